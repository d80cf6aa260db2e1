"""Attention over packed rows: `packed` chooses among three implementations."""
