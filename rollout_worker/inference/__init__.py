"""Sampling turns from the servers: the port, wire format, HTTP, choice of server and retries."""
