"""Weights over CPU and plain TCP, staged: for vLLM on a CPU, and where no faster network is."""
