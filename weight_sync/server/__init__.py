"""Talks to one vLLM server."""
