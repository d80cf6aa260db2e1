"""A step of a mixture whose rows name experts: what is recorded is counted, and what it changes is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.learner.feed.packing import Sample, pack
from slipstream.learner.feed.recorded_experts import RoutedLayers
from slipstream.learner.report.sampler_checks import no_experts_warning
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.messages import RoutedExperts, Segment
from tests.kit.learner import step_rollouts
from tests.learner.attention.test_experts import policy_of, recorded
from tests.learner.families import MIXTURES
from tests.learner.model.test_model_families import samples

MEASURED = ("router_replay/logprob_diff", "router_replay/logprob_diff_without")


def sampled_elsewhere(items: list[Sample], path: Path) -> list[Sample]:
    """The samples as if servers had chosen the experts after those that the model chooses."""
    policy = policy_of(MIXTURES["Qwen3-MoE"](), path)
    found = []
    for item in recorded(policy, items):
        assert item.experts is not None
        experts = np.where(item.experts < 0, -1, (item.experts + 1) % 4)
        row = pack([replace(item, experts=experts)], 400)[0]
        behaviour = np.zeros_like(item.behaviour)
        behaviour[item.weights > 0] = policy(row).logprobs.detach().numpy()
        found.append(replace(item, experts=experts, behaviour=behaviour))
    return found


def test_what_replay_changes_is_measured_every_so_many_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    items = sampled_elsewhere(samples(), tmp_path / "a")
    items[0] = replace(items[0], experts=None)
    torch.manual_seed(0)
    policy = policy_of(MIXTURES["Qwen3-MoE"](), tmp_path / "b")
    section = LearnerSection(router_replay=True, router_replay_check_every=2, learning_rate=1e-9)
    trainer = PolicyTrainer(policy, section, 64)
    rows = pack(items[1:], 400)
    found = [trainer.step(rows, step_rollouts(items)).beside for _ in range(3)]
    assert [MEASURED[0] in of for of in found] == [True, False, True]
    with_replay, without = (found[0][name] for name in MEASURED)
    assert with_replay < 1e-5
    assert without > 1e-4
    assert found[0]["router_replay/recorded"] == 1
    mixed = trainer.step(pack(items, 400), step_rollouts(items)).beside
    assert 0 < mixed["router_replay/recorded"] < 1
    none = trainer.step(pack([replace(item, experts=None) for item in items], 400), step_rollouts(items))
    assert none.beside["router_replay/recorded"] == 0
    assert "--enable-return-routed-experts" in (no_experts_warning(none) or "")
    assert no_experts_warning(replace(none, beside=mixed)) is None
    assert no_experts_warning(replace(none, beside={})) is None


@pytest.mark.parametrize(
    ("layers", "top_k", "highest", "known"), [(3, 2, 3, True), (2, 2, 3, False), (3, 1, 3, False), (3, 2, 4, False)]
)
def test_experts_of_another_model_are_not_taken(layers: int, top_k: int, highest: int, known: bool) -> None:
    ids = np.full((2, layers, top_k), highest, np.uint8)
    segment = Segment(
        np.zeros(4, np.int32),
        np.zeros(4, np.bool_),
        np.zeros(4, np.float32),
        [],
        RoutedExperts(ids.reshape(-1), layers, top_k, [(0, 1), (2, 3)]),
    )
    found = RoutedLayers((1, 2), 4, 2).of(segment)
    assert (found is not None) == known
    if found is not None:
        assert found[:, 0, 0].tolist() == [highest, -1, highest, -1]
        assert found.shape == (4, 2, 2)
