"""Trains on a batch: runs the passes over it and the optimiser step."""
