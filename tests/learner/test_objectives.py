from __future__ import annotations

import math

import pytest

from learner.algorithm import objectives
from protocol.config import LearnerSection
from tests.kit.learner import tokens

OBJECTIVE = objectives.build(LearnerSection(objective="ppo_clip", clip_low=0.2, clip_high=0.28))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # a good token is not pushed above 1 + clip_high
        (1.5, -2.0, 3.0, 3.0),  # but pulled back from there if it is bad
        (0.5, -2.0, 1.6, 0.0),  # a bad token is not pushed below 1 - clip_low
        (0.5, 2.0, -1.0, -1.0),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clips_only_what_would_go_further(ratio: float, advantage: float, loss: float, slope: float) -> None:
    given = tokens([ratio], [advantage])
    result = OBJECTIVE(given)
    assert result.losses.item() == pytest.approx(loss, abs=1e-5)
    result.losses.sum().backward()
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.item() == pytest.approx(slope, abs=1e-5)


def test_sums_are_over_tokens_with_weight() -> None:
    sums = OBJECTIVE(tokens([1.5, 0.5, 1.5, 9.0], [1.0, -1.0, -1.0, 1.0], [1.0, 1.0, 1.0, 0.0])).sums
    assert float(sums["ratio"]) == pytest.approx(3.5)
    assert float(sums["ratio_squared"]) == pytest.approx(1.5**2 + 0.5**2 + 1.5**2)
    assert (int(sums["clip_ratio/low_mean"]), int(sums["clip_ratio/high_mean"])) == (1, 1)
    k3 = sum(ratio - 1 - math.log(ratio) for ratio in (1.5, 0.5, 1.5))
    assert float(sums["kl"]) == pytest.approx(k3, abs=1e-5)


def test_figures_are_means_and_the_effective_sample_size() -> None:
    sums = {
        "ratio": 6.0,
        "ratio_squared": 12.0,
        "clip_ratio/low_mean": 1.0,
        "clip_ratio/high_mean": 2.0,
        "kl": 0.4,
    }
    assert OBJECTIVE.figures(sums, 4) == {
        "ratio": 1.5,
        "clip_ratio/low_mean": 0.25,
        "clip_ratio/high_mean": 0.5,
        "clip_ratio/region_mean": 0.75,
        "kl": 0.1,
        "ess": 0.75,
    }
