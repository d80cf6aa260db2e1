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


def build(model: torch.nn.Module, section: LearnerSection) -> Optimiser:
    """Weight decay leaves out vectors (norms, biases), as is usual."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(
        [group for group in groups if group["params"]], lr=section.learning_rate, betas=section.betas, fused=True
    )
    return Optimiser(adamw, LambdaLR(adamw, lambda step: warmup_factor(step, section.warmup_steps)))


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Share of the learning rate that optimiser step `step`, counted from 0, uses."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
