"""On a GPU, reading a tensor's value makes the host wait. No value is read inside a row.

The meta device stands in for a GPU: its tensors have no values, and who reads one gets an error. It takes the same ways
through the code as a GPU does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.drift import drift_sums
from slipstream.learner.feed import packing
from slipstream.learner.feed.packing import PackedRow, pack
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.training.passes import Known, Preparation
from slipstream.learner.training.step_sums import add, sampler_kl
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.config.sections.presets import PRESETS
from tests.kit.learner import sample, step_rollouts
from tests.kit.model import tiny_model

META = torch.device("meta")


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.nonzero, bool, lambda t: t[t > 0]])
def test_the_stand_in_notices(read: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.ones(1, device=META))


@pytest.mark.parametrize("algorithm", PRESETS)
def test_no_value_is_read_inside_a_row(algorithm: str) -> None:
    samples = [sample(30, 5, i, rollout=i) for i in range(4)]
    rollouts = step_rollouts(samples)
    rows = pack(samples, 64)
    assert len(rows) > 1
    policy = Policy(
        tiny_model(attn_implementation=packing.PACKED_ATTENTION).to(META), packing.PACKED_ATTENTION, Scoring(0.7, 1)
    )
    parts = Algorithm(LearnerSection(algorithm=algorithm), 64)  # type: ignore[arg-type]
    moved = [row.to(META) for row in rows]
    preparation = Preparation(parts, rollouts, moved, [Known()] * len(rows), META)
    figures: dict[str, torch.Tensor] = {}
    for row, known in zip(moved, preparation.known, strict=True):
        scores = policy(row)
        result = parts(preparation.tokens(row, scores, known))
        result.losses.sum().backward()  # type: ignore[no-untyped-call]
        drift = scores.logprobs.detach() - row.behaviour
        add(figures, {**result.sums, **sampler_kl(drift, row.fresh), **drift_sums(drift, row.staleness)})
    assert all(figure.device == META for figure in figures.values())


def test_a_row_goes_to_page_locked_memory_and_from_there_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    (row,) = pack([sample(30, 5, 0)], 64)
    held = row.pinned()
    tensors = [name for name, value in vars(row).items() if isinstance(value, torch.Tensor)]
    assert len(pinned) == len(tensors) == 11
    assert all(getattr(held, name) is not getattr(row, name) for name in tensors)
    assert all(torch.equal(getattr(held, name), getattr(row, name)) for name in tensors)
    moved: PackedRow = held.to(META)
    assert all(getattr(moved, name).device == META for name in tensors)
