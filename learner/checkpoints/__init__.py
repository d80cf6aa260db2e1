"""Checkpoints' models for others: the model card beside the weights, and the way to the Hugging Face hub."""

from __future__ import annotations
