"""Starts Slipstream: the command line, the checks before a run, the supervisor, and vLLM's server."""
