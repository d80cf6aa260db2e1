"""Sends weights over plain TCP by gloo, staged: for servers on a CPU, and where there is no faster network."""
