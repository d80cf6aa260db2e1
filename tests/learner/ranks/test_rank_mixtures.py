"""Ranks of a mixture of experts: a row that leaves experts out gives one rank's gradient, and torch has no warnings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.learner.feed.packing import pack
from slipstream.learner.run import build_trainer
from tests.kit import LEARNER, config
from tests.kit.learner import step_rollouts
from tests.kit.ranks import Ranks
from tests.learner.families import MIXTURES
from tests.learner.ranks.test_ranks import STILL, samples_of, step


@pytest.mark.parametrize("name", MIXTURES)
def test_a_short_row_reaches_all_weights_of_a_mixture_whose_experts_are_one_tensor(name: str, tmp_path: Path) -> None:
    MIXTURES[name]().save_pretrained(tmp_path)
    trainer = build_trainer(config(LEARNER, model={"path": str(tmp_path)}), None)
    samples = samples_of([6], 1, seed=0)
    trainer.policy(pack(samples, 64)[0]).logprobs.sum().backward()
    without = [name for name, of in trainer.policy.named_parameters() if of.requires_grad and of.grad is None]
    assert bool(without) is trainer.policy.skips_weights is False


@pytest.mark.parametrize("replay", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_two_ranks_make_the_gradient_of_one_without_a_warning(
    replay: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    MIXTURES["Qwen3-MoE"]().save_pretrained(tmp_path / "model")
    learner = {"ranks": 2, **STILL, "router_replay": replay, "router_replay_check_every": 1}
    several = config(LEARNER, model={"path": str(tmp_path / "model")}, run={"dir": str(tmp_path)}, learner=learner)
    one = several.model_copy(update={"learner": several.learner.model_copy(update={"ranks": 1})})
    samples = samples_of([6, 7, 8, 9], 1, seed=1)
    if replay:
        chosen = np.random.default_rng(0).permuted(np.tile(np.arange(4), (9, 2, 1)), axis=-1)[..., :2].astype(np.int16)
        samples = [replace(of, experts=chosen[: len(of)]) for of in samples]
    rollouts = step_rollouts(samples)
    with Ranks(several, fresh=True) as ranks:
        apart, gradient = ranks.call(step, pack(samples, 16, ranks=2), rollouts)
    together, right = step(build_trainer(one, None), pack(samples, 16), rollouts)
    assert ("router_replay/logprob_diff" in apart.beside) is replay
    assert (
        apart.beside.get("router_replay/recorded")
        == together.beside.get("router_replay/recorded")
        == (1 if replay else None)
    )
    for ours, theirs in zip(gradient, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    assert "find_unused_parameters" not in capfd.readouterr().err
