"""Sampling from the fleet of vLLM servers: wire format, HTTP, routing and retries."""
