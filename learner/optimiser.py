"""AdamW and its schedule: linear warm-up, then constant."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from protocol.config import LearnerSection


class Optimiser(NamedTuple):
    adamw: torch.optim.Optimizer
    schedule: LambdaLR


def build(model: torch.nn.Module, settings: LearnerSection) -> Optimiser:
    """Weight decay spares vectors (norms, biases), as is usual."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(
        [group for group in groups if group["params"]], lr=settings.learning_rate, betas=settings.betas, fused=True
    )
    return Optimiser(adamw, LambdaLR(adamw, lambda step: warmup_factor(step, settings.warmup_steps)))


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Part of the learning rate that optimiser step `step` (from 0) uses."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
