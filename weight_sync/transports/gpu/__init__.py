"""Transports between GPUs: `nccl` loads in place under the pause, `nccl_staged` stages over NCCL, `ipc` copies within
one GPU that learner and server share."""

from __future__ import annotations
