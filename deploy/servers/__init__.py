"""Starts vLLM servers, lets them join and leave a run, and decides which devices and memory they use."""
