"""Runs inside vLLM's engine processes."""
