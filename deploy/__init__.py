"""Starts Slipstream: the command line, the checks before a run, the supervisor, and the inference server."""
