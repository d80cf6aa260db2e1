"""One optimiser step over a batch of packed rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from learner import optimiser
from learner.algorithm.objectives import Grpo, Objective, Tokens
from learner.feed.packing import PackedRow
from learner.model.logprobs import TokenScores
from learner.model.policy import Policy
from protocol.config import LearnerSection


class DivergedError(RuntimeError):
    """The gradient is not finite: a step would destroy the weights."""


@dataclass(frozen=True)
class StepFigures:
    """What one optimiser step did; every share and mean is over the tokens with weight.

    ess: effective sample size of the importance ratios, (sum r)^2 / (n sum r^2), from 0 to 1.
    """

    loss: float
    ratio: float
    clipped_low: float
    clipped_high: float
    kl: float
    entropy: float
    ess: float
    grad_norm: float
    learning_rate: float
    train_s: float


class Trainer:
    """Owns policy, optimiser and schedule; knows nothing of the queue or of versions."""

    def __init__(self, policy: Policy, settings: LearnerSection) -> None:
        self.accelerator = Accelerator()
        self.objective: Objective = Grpo(settings.clip_low, settings.clip_high)
        self._max_grad_norm = settings.max_grad_norm
        adamw, self.schedule = optimiser.build(policy, settings)
        self._policy, self.optimiser = self.accelerator.prepare(policy, adamw)

    @property
    def policy(self) -> Policy:
        policy: Policy = self.accelerator.unwrap_model(self._policy)
        return policy

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    def step(self, rows: Sequence[PackedRow], tokens: int) -> StepFigures:
        """Train on `rows`, of which `tokens` tokens have weight: the one normaliser of the step.

        Raises `DivergedError` before any weight is touched.
        """
        started = time.perf_counter()
        sums: dict[str, torch.Tensor] = {}
        for row in rows:
            for name, value in self._backward(row.to(self.device), tokens).items():
                sums[name] = sums[name] + value if name in sums else value
        grad_norm = float(self.accelerator.clip_grad_norm_(self._policy.parameters(), self._max_grad_norm))
        if not torch.isfinite(torch.tensor(grad_norm)):
            raise DivergedError(
                f"the gradient's norm is {grad_norm}: lower learner.learning_rate, or use model.dtype = float32; the "
                f"last checkpoint is intact"
            )
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.schedule.step()
        figures = {name: float(value) for name, value in sums.items()}
        return StepFigures(
            loss=figures["loss"],
            ratio=figures["ratio"] / tokens,
            clipped_low=figures["clipped_low"] / tokens,
            clipped_high=figures["clipped_high"] / tokens,
            kl=figures["kl"] / tokens,
            entropy=figures["entropy"] / tokens,
            ess=figures["ratio"] ** 2 / (tokens * figures["ratio_squared"]),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            train_s=time.perf_counter() - started,
        )

    def state(self) -> dict[str, Any]:
        """Optimiser and schedule, as tensors and plain values."""
        return {"optimiser": self.optimiser.state_dict(), "schedule": self.schedule.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])

    def _backward(self, row: PackedRow, tokens: int) -> dict[str, torch.Tensor]:
        """Add one row's gradients; returns its sums, left on the device so that no row waits for it."""
        scores: TokenScores = self._policy(row)
        result = self.objective(Tokens(scores.logprobs, row.behaviour, row.advantages, row.weights))
        loss = result.losses.sum() / tokens
        self.accelerator.backward(loss)
        entropy = (scores.entropy * (row.weights > 0)).sum()
        return {"loss": loss.detach(), "entropy": entropy, **result.sums}
