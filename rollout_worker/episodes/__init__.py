"""Runs episodes of every kind of task."""
