"""Attention over packed rows: one file per implementation."""
