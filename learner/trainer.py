"""One optimiser step over a batch of packed rows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from learner import optimiser
from learner.algorithm import objectives
from learner.algorithm.objectives.base import Tokens
from learner.feed.packing import PackedRow
from learner.model.logprobs import TokenScores
from learner.model.policy import Policy
from protocol.config import LearnerSection


class DivergedError(RuntimeError):
    """The gradient is not finite: a step would destroy the weights."""


@dataclass(frozen=True)
class StepFigures:
    """What one optimiser step did, a part of the step's line in `metrics.jsonl`.

    entropy: mean over the tokens with weight, in nats; grad_norm: before it is clipped; train_s: seconds of the step;
    objective: the objective's own figures, None where one is not finite.
    """

    loss: float
    entropy: float
    grad_norm: float
    learning_rate: float
    train_s: float
    objective: Mapping[str, float | None] = field(default_factory=dict)


class Trainer:
    """Owns policy, optimiser and schedule; knows nothing of the queue or of versions."""

    def __init__(self, policy: Policy, section: LearnerSection) -> None:
        self.accelerator = Accelerator()
        self.objective = objectives.build(section)
        self._max_grad_norm = section.max_grad_norm
        adamw, self.schedule = optimiser.build(policy, section)
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
        own: dict[str, torch.Tensor] = {}
        sums: dict[str, torch.Tensor] = {}
        for row in rows:
            row = row.to(self.device)
            scores: TokenScores = self._policy(row)
            result = self.objective(Tokens(scores.logprobs, row.behaviour, row.advantages, row.weights))
            loss = result.losses.sum() / tokens
            self.accelerator.backward(loss)
            _add(own, {"loss": loss.detach(), "entropy": (scores.entropy * (row.weights > 0)).sum()})
            _add(sums, result.sums)

        grad_norm = float(self.accelerator.clip_grad_norm_(self._policy.parameters(), self._max_grad_norm))
        if not math.isfinite(grad_norm):
            raise DivergedError(
                f"the gradient's norm is {grad_norm}: lower learner.learning_rate, or use model.dtype = float32; the "
                f"last checkpoint is intact"
            )
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.schedule.step()
        figures = self.objective.figures({name: float(value) for name, value in sums.items()}, tokens)
        return StepFigures(
            loss=float(own["loss"]),
            entropy=float(own["entropy"]) / tokens,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            train_s=time.perf_counter() - started,
            objective=figures,
        )

    def state(self) -> dict[str, Any]:
        """Optimiser and schedule, as tensors and plain values."""
        return {"optimiser": self.optimiser.state_dict(), "schedule": self.schedule.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])


def _add(total: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    """Add scalars by name, on their device: no row waits for another's."""
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value
