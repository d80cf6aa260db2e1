"""Weights over NCCL into vLLM's own engine, which loads them in place, under the pause."""
