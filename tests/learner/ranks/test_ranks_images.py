"""Ranks whose rows differ in that some have images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.learner.feed.packing import pack
from slipstream.learner.run import build_trainer
from tests.kit import LEARNER, config
from tests.kit.learner import step_rollouts
from tests.kit.ranks import Ranks
from tests.kit.seeing import build_seeing
from tests.learner.model.test_vision import ONE, sample
from tests.learner.ranks.test_ranks import STILL, step

SEEN = sample([30, -1, -1, -1, -1, 31, 32, 33, 34], 0, {0: ONE})
READ = sample([30, 31, 32, 33, 34, 35, 36, 37, 38], 1, {})


@pytest.mark.wide
@pytest.mark.parametrize(("shard", "vision"), [(True, False), (False, True)])
def test_i10_a_row_without_images_beside_one_with_them(shard: bool, vision: bool, tmp_path: Path) -> None:
    """Sharded, ranks would gather unlike layers; as copies, one would wait for gradients that the other has not."""
    folder = build_seeing(tmp_path / "model")
    wanted = {
        "model": {"path": str(folder), "train_vision": vision},
        "images": {"enabled": True},
        "run": {"dir": str(tmp_path)},
    }
    several = config(LEARNER, **wanted, learner={"ranks": 2, **STILL, "shard_weights": shard})
    one = config(LEARNER, **wanted, learner={"ranks": 1, **STILL})
    for samples in ([SEEN, READ], [SEEN], [replace(READ, rollout=0), READ]):
        rollouts = step_rollouts(samples)
        with Ranks(several, fresh=True) as ranks:
            _, gradients = ranks.call(step, pack(samples, 10, branches=False, ranks=2), rollouts)
        _, right = step(build_trainer(one, None), pack(samples, 10, branches=False), rollouts)
        for found, expected in zip(gradients, right, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_a_part_that_sees_is_not_trained_in_shards() -> None:
    wanted = {"model": {"path": "m", "train_vision": True}, "images": {"enabled": True}}
    with pytest.raises(ValueError, match=r"shard_weights = true, model\.train_vision = true: a rank whose rows"):
        config(LEARNER, **wanted, learner={"ranks": 2, "shard_weights": True})
