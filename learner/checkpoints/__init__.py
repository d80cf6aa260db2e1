"""Checkpoints: written, chosen to resume from, and prepared for others with a model card and uploads to the hub."""
