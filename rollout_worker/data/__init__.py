"""Data sets: rows and their columns."""
