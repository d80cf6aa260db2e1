"""Trains: the passes over a batch, and the optimiser step."""
