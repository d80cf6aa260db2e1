"""Runs inside vLLM's engine processes: receives weights, builds them during generation, exchanges and proves them."""
