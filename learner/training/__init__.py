"""The optimiser step."""
