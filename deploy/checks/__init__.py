"""Checks that a command makes before it starts anything."""
