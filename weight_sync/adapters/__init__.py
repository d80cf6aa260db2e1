"""Versions published as adapters alone: about a hundredth of the bytes, and no pause."""
