"""Weights as flat buffers."""
