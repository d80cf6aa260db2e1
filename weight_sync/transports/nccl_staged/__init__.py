"""Weights over NCCL into staging beside generation, and from device to device into the model under the pause."""
