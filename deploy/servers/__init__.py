"""Starts vLLM servers and describes the devices that they use."""
