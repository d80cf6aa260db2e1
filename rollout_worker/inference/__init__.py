"""Sampling turns from the vLLM servers: wire format, HTTP, choice of server and retries."""
