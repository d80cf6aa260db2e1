"""Runs inside vLLM's engine processes: receives weights, builds them beside generation, exchanges and proves them."""
