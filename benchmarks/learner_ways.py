"""Implements two ways that `benchmarks.learner` compares: ours, and a plain padded loop.

`learner_trl` has TRL's way. Every way makes the same step of the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence

from benchmarks.learner_cases import Batch, Size
from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.feed import packing
from slipstream.learner.feed.packing import PackedRow, Sample, pack
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.model.precision import Precision
from slipstream.learner.training import optimiser
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection

# The rate is so low that the weights, and with them the work, stay the same. Without `delta`, which the other ways do
# not have: random policies as wide as a real one are far enough from the sampler's log-probs for it to cut tokens off.
SECTION = LearnerSection(learning_rate=1e-9, delta="none")


class Way(Protocol):
    """Makes an optimiser step of a batch, from samples on the host to new weights."""

    name: str
    model: Any
    optimiser: torch.optim.Optimizer
    forwarded: int

    def step(self) -> float:
        """Make a step and return its loss."""


class Ours:
    """Makes a step with `pack` and `PolicyTrainer.step`.

    Attributes:
        forwarded: Tokens of the rows of the last step.
    """

    name = "ours"

    def __init__(
        self, size: Size, batch: Batch, budget: int, device: torch.device, compute: torch.dtype | None = None
    ) -> None:
        self.model = size.build(packing.PACKED_ATTENTION, device)
        precision = None if compute is None else Precision(torch.float32, compute, compute)
        policy = Policy(self.model, packing.PACKED_ATTENTION, Scoring(1.0, SECTION.logits_mib), precision)
        self._trainer = PolicyTrainer(policy, SECTION, longest=2048)
        self._batch, self._budget = batch, budget
        self.optimiser = self._trainer.optimiser.optimizer
        self.forwarded = 0

    def rows(self) -> list[PackedRow]:
        """Return the rows of a step, on the host."""
        return pack(self._batch.samples, self._budget)

    def step(self) -> float:
        rows = self.rows()
        self.forwarded = sum(row.tokens for row in rows)
        return self._trainer.step(rows, self._batch.rollouts).loss


class Padded:
    """Makes a step with a plain loop over a Hugging Face model.

    Micro-batches keep the order of the samples, are padded to the longest, and compute all logits at once.
    """

    name = "padded"

    def __init__(self, size: Size, batch: Batch, budget: int, device: torch.device) -> None:
        self.model = size.build("sdpa", device)
        self.optimiser = optimiser.build_optimiser(self.model, SECTION).stepper
        self.forwarded = 0
        self._samples, self._budget, self._device = batch.samples, budget, device
        self._advantages, self._tokens = advantages_of(batch)

    def step(self) -> float:
        loss = torch.zeros((), device=self._device)
        self.forwarded = 0
        for micro_batch in micro_batches(self._samples, self._budget):
            part = self._loss(micro_batch)
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), SECTION.max_grad_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss)

    def _loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        token_ids = self._padded([torch.from_numpy(of.token_ids).long() for of in samples])
        seen = self._padded([torch.ones(len(of), dtype=torch.int64) for of in samples])
        self.forwarded += token_ids.numel()
        logits = self.model(input_ids=token_ids, attention_mask=seen, use_cache=False).logits[:, :-1].float()
        logprobs = log_softmax(logits, -1).gather(-1, token_ids[:, 1:, None])[..., 0]
        behaviour = self._padded([torch.from_numpy(of.behaviour) for of in samples])[:, 1:]
        weights = self._padded([torch.from_numpy(of.weights) for of in samples])[:, 1:]
        advantages = torch.tensor([self._advantages[of.rollout] for of in samples], device=self._device)[:, None]
        ratio = (logprobs - behaviour).exp()
        clipped = ratio.clamp(1 - SECTION.clip_low, 1 + SECTION.clip_high)
        return -(torch.minimum(ratio * advantages, clipped * advantages) * weights).sum() / self._tokens

    def _padded(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(list(tensors), batch_first=True).to(self._device)


def micro_batches(samples: Sequence[Sample], budget: int) -> Iterator[list[Sample]]:
    """Yield micro-batches of samples in their order, each with as many as fit the budget.

    Args:
        samples: The samples of a step.
        budget: Maximum tokens of a micro-batch, with padding to its longest sample.
    """
    members: list[Sample] = []
    longest = 0
    for sample in samples:
        longest = max(longest, len(sample))
        if members and longest * (len(members) + 1) > budget:
            yield members
            members, longest = [], len(sample)
        members.append(sample)
    yield members


def advantages_of(batch: Batch) -> tuple[list[float], int]:
    """Return the advantage of each rollout, and the number of tokens of the step that train."""
    advantages: list[float] = Algorithm(SECTION, longest=2048).advantages(batch.rollouts).tolist()
    return advantages, int(batch.rollouts.tokens.sum())
