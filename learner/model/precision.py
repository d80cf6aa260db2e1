"""In which types the learner keeps its weights, computes, and hands weights on.

Weights that a step moves are kept in float32 and computed with in `model.dtype` (mixed precision, arXiv:1710.03740,
section 3.1): a step of 1e-6 is far below what bfloat16 can add to most weights, and would be lost in rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch

from protocol.config import LearnerSection, ModelSection

# Of each tensor, this many weights are looked at for `changed_share`.
LOOKED_AT = 10_000


@dataclass(frozen=True)
class Precision:
    """weights: what the optimiser steps on; compute: what products are computed in; servers: what is published."""

    weights: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    servers: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: ModelSection, learner: LearnerSection) -> Self:
        """float16 is for servers only: its gradients would underflow without a loss scaler, so that the learner
        computes in float32."""
        servers: torch.dtype = getattr(torch, model.dtype)
        compute = torch.float32 if servers is torch.float16 else servers
        return cls(compute if learner.weights_dtype == "model" else torch.float32, compute, servers)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Around what computes with the weights."""
        if self.weights is self.compute:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)


def changed_share(weights: Iterable[tuple[str, torch.Tensor]], learning_rate: float) -> float:
    """The share of weights that a step of the size of the learning rate changes at all, in their own type.

    AdamW's steps are about as long as that. Measured by adding it to the first `LOOKED_AT` weights of each tensor.
    """
    changed = total = 0.0
    for _, tensor in weights:
        few = tensor.flatten()[:LOOKED_AT]
        share = float((few + learning_rate != few).float().mean())
        changed, total = changed + share * tensor.numel(), total + tensor.numel()
    return changed / total


def warning(
    precision: Precision, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], learning_rate: float
) -> str | None:
    """What to say of weights that are stepped in a low precision; None in float32, for which they are not asked for."""
    if precision.weights is torch.float32:
        return None
    name = str(precision.weights).removeprefix("torch.")
    share = changed_share(weights(), learning_rate)
    return (
        f"learner.weights_dtype = model steps on weights in {name}: at learner.learning_rate = {learning_rate:g} a "
        f"step changes {share:.2%} of them, and rounding loses the rest; leave learner.weights_dtype at float32, which "
        f"takes 8 bytes more for each weight"
    )
