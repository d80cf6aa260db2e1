"""Weights from the learner to a server on the same GPU: the server opens the learner's memory and copies from it.

Weights over NCCL into vLLM's own engine, which loads them in place, under the pause.

Weights over NCCL into staging beside generation, and from device to device into the model under the pause.
"""

from __future__ import annotations
