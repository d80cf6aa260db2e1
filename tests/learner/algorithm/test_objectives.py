"""Each objective against numbers worked by hand: loss and slope of a token, and what is counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm import objectives
from slipstream.learner.algorithm.objectives import OBJECTIVES, Objective
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import tokens

OBJECTIVE = objectives.build(LearnerSection(objective="ppo_clip", clip_low=0.2, clip_high=0.28))
# Of a token with the advantage 1, the most that each objective lets it weigh in the gradient.
HEAVIEST = {
    "ppo_clip": 4.0,
    "gspo": 4.0,
    "sequence_clip": 4.0,
    "cispo": 1.28,
    "sequence_cispo": 1.28,
    "dppo": 20.0,
    "sapo": 1.58,
    "vespo": 1.25,
    "reinforce": 1.0,
}


def made(objective: str, **settings: object) -> Objective:
    return objectives.build(LearnerSection(objective=objective, **settings))


def slopes(objective: Objective, ratios: list[float], advantage: float) -> tuple[list[float], list[float]]:
    """Losses and their derivatives by each log-prob, of one rollout whose tokens have these ratios."""
    given = tokens(ratios, [advantage] * len(ratios))
    losses = objective(given).losses
    losses.sum().backward()
    assert given.logprobs.grad is not None
    return losses.tolist(), given.logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # a good token is not pushed above 1 + clip_high
        (1.5, -2.0, 3.0, 3.0),  # but pulled back from there if it is bad
        (3.9, -2.0, 7.8, 7.8),
        (4.1, -2.0, 8.0, 0.0),  # as far as delta
        (0.5, -2.0, 1.6, 0.0),  # a bad token is not pushed below 1 - clip_low
        (0.5, 2.0, -1.0, -1.0),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clips_only_what_would_go_further(ratio: float, advantage: float, loss: float, slope: float) -> None:
    losses, gradient = slopes(OBJECTIVE, [ratio], advantage)
    assert losses == pytest.approx([loss], abs=1e-5)
    assert gradient == pytest.approx([slope], abs=1e-5)


LOG_2, LOG_3, LOG_9 = math.log(2), math.log(3), math.log(9)


@pytest.mark.parametrize(
    ("objective", "ratios", "advantage", "losses", "gradient"),
    [
        # The mean ratio of (4, 1) is 2: the one at 1 is clipped with the other, though it did not move.
        (made("gspo"), [4.0, 1.0], 1.0, [-1.28] * 2, [0.0] * 2),
        (made("gspo"), [4.0, 1.0], -1.0, [2.0] * 2, [2.0] * 2),
        (made("gspo"), [36.0, 1.0], -1.0, [4.0] * 2, [0.0] * 2),
        (made("gspo"), [0.25, 1.0], 1.0, [-0.5] * 2, [-0.5] * 2),
        # The ratio of the whole is 3, and its loss stands half in each token.
        (made("sequence_clip"), [2.0, 1.5], 1.0, [-0.64] * 2, [0.0] * 2),
        (made("sequence_clip"), [2.0, 1.5], -1.0, [1.5] * 2, [3.0] * 2),
        (made("sequence_clip"), [3.0, 2.0], -1.0, [2.0] * 2, [0.0] * 2),
        (made("sequence_clip", delta="none"), [3.0, 2.0], -1.0, [3.0] * 2, [6.0] * 2),
        (made("cispo", clip_high=4.0), [3.0], 2.0, [-6 * (LOG_3 - 2)], [-6.0]),
        (made("cispo", clip_high=4.0), [9.0], 2.0, [-10 * (LOG_9 - 2)], [-10.0]),
        (made("cispo", clip_high=4.0), [9.0], -2.0, [10 * (LOG_9 - 2)], [10.0]),
        # The sampler's probability was exp(-2) = 0.135.
        (made("dppo"), [2.0], 1.0, [-2 * (LOG_2 - 2)], [-2.0]),  # 0.135 farther
        (made("dppo"), [3.0], 1.0, [0.0], [0.0]),  # 0.271 farther
        (made("dppo"), [3.0], -1.0, [3 * (LOG_3 - 2)], [3.0]),  # as far, but on its way back
        (made("dppo", dppo_threshold=0.1), [0.25], -1.0, [0.0], [0.0]),  # 0.102 farther
        (made("dppo", dppo_threshold=0.11), [0.25], -1.0, [0.25 * (-2 * LOG_2 - 2)], [0.25]),
        (made("dppo", dppo_divergence="kl"), [2.0], 1.0, [0.0], [0.0]),  # 0.053 nats
        (made("dppo", dppo_divergence="kl"), [1.9], 1.0, [-1.9 * (math.log(1.9) - 2)], [-1.9]),  # 0.043 nats
        (made("dppo", dppo_divergence="kl"), [2.0], -1.0, [2 * (LOG_2 - 2)], [2.0]),
        # sigmoid(1) = 0.7310586, and the slope of the sigmoid there 0.1966119.
        (made("sapo"), [2.0], 2.0, [-8 * 0.7310586], [-8 * 0.1966119 * 2]),
        (made("sapo", sapo_temperature_neg=2.0), [1.5], -1.0, [2 * 0.7310586], [4 * 0.1966119 * 1.5]),
        # w = 2 of the whole rollout: 2^2 exp(-3) and 2^3 exp(-2).
        (made("vespo"), [2.0], 1.0, [-0.1991483 * (LOG_2 - 2)], [-0.1991483]),
        (made("vespo"), [2.0, 1.0], -1.0, [1.0826823 * (LOG_2 - 2), -2 * 1.0826823], [1.0826823] * 2),
        (made("importance"), [9.0, 0.5], 2.0, [-18.0, -1.0], [-18.0, -1.0]),
        (made("reinforce"), [9.0, 0.5], 2.0, [-2 * (LOG_9 - 2), -2 * (-LOG_2 - 2)], [-2.0, -2.0]),
    ],
)
def test_losses_and_slopes_as_by_hand(
    objective: Objective, ratios: list[float], advantage: float, losses: list[float], gradient: list[float]
) -> None:
    actual_losses, actual_gradient = slopes(objective, ratios, advantage)
    assert actual_losses == pytest.approx(losses, abs=1e-5)
    assert actual_gradient == pytest.approx(gradient, abs=1e-5)


@pytest.mark.parametrize("name", HEAVIEST)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_one_wild_token_weighs_no_more_than_the_bound(name: str, advantage: float) -> None:
    """At whatever log-ratio from -18 to 18, in its own rollout or next to others."""
    assert set(HEAVIEST) | {"importance"} == set(OBJECTIVES)
    for log_ratio in np.linspace(-18, 18, 73):
        for ratios in ([math.exp(log_ratio)], [math.exp(log_ratio), 1.0, 1.0]):
            _, gradient = slopes(made(name), ratios, advantage)
            assert max(map(abs, gradient)) <= HEAVIEST[name] + 1e-4, f"log-ratio {log_ratio}"


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "sequence_clip"])
def test_delta_none_leaves_a_bad_token_s_ratio_unbounded(name: str) -> None:
    _, gradient = slopes(made(name, delta="none"), [math.exp(12)], -1.0)
    assert gradient == pytest.approx([math.exp(12)], rel=1e-4)


def test_dppo_bounds_the_ratio_of_a_token_that_was_rare() -> None:
    """From 1e-7 to 0.01 the probability moved by less than the threshold, and the ratio is 1e5."""
    old, new = torch.tensor([math.log(1e-7)]), torch.tensor([math.log(0.01)])
    given = tokens([1.0], [1.0], behaviour=old, logprobs=new)
    made("dppo")(given).losses.sum().backward()
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.item() == pytest.approx(-20.0)


def test_dppo_kl_is_exact_where_a_token_is_almost_certain() -> None:
    """1 - p = 1e-6 from 1e-2: KL = 0.99 log(0.99 / (1 - 1e-6)) + 0.01 log(0.01 / 1e-6) = 0.0822; a p of float32 holds
    1e-6 to a few digits only."""
    old, new = torch.tensor([math.log1p(-1e-2)]), torch.tensor([math.log1p(-1e-6)])
    kept = []
    for threshold in (0.0820, 0.0824):
        given = tokens([1.0], [1.0], behaviour=old, logprobs=new)
        made("dppo", dppo_divergence="kl", dppo_threshold=threshold)(given).losses.sum().backward()
        assert given.logprobs.grad is not None
        kept.append(given.logprobs.grad.item() != 0)
    assert kept == [False, True]


def test_sums_are_over_tokens_with_weight() -> None:
    row = tokens([1.5, 0.5, 1.5, 9.0, 9.0], [1.0, -1.0, -1.0, 1.0, -1.0], [1.0, 1.0, 1.0, 0.0, 1.0])
    sums, drift = OBJECTIVE(row).sums, OBJECTIVE.drift(row)
    assert float(sums["ratio"]) == float(drift["ratio"]) == pytest.approx(12.5)
    assert float(drift["ratio_squared"]) == pytest.approx(1.5**2 + 0.5**2 + 1.5**2 + 81)
    sides = ("low", "high", "region", "delta")
    assert [int(sums[f"clip_ratio/{side}_mean"]) for side in sides] == [1, 1, 2, 1]
    k3 = sum(ratio - 1 - math.log(ratio) for ratio in (1.5, 0.5, 1.5, 9.0))
    assert float(drift["kl"]) == pytest.approx(k3, abs=1e-5)
    assert float(drift["count"]) == 4


def test_figures_are_means_and_the_effective_sample_size() -> None:
    assert OBJECTIVE.metrics({"ratio": 6.0, "clip_ratio/low_mean": 1.0}, 4) == {
        "ratio": 1.5,
        "clip_ratio/low_mean": 0.25,
    }
    drift = {"kl": 0.4, "ratio": 6.0, "ratio_squared": 12.0, "count": 4.0}
    assert OBJECTIVE.drift_metrics(drift, 4) == {"kl": 0.1, "ess": 0.75}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_figures_of_a_step_whose_tokens_were_all_masked_are_zero(name: str) -> None:
    objective = made(name)
    sums = {key: float(value) for key, value in objective(tokens([1.5, 3.0], [1.0, 1.0], [0.0, 0.0])).sums.items()}
    assert set(objective.metrics(sums, 1).values()) == {0.0}


@pytest.mark.parametrize(("name", "ratios"), [("gspo", (2.0, 0.5)), ("sequence_clip", (4.0, 0.125)), ("vespo", None)])
def test_figures_of_a_rollout_s_ratio_are_means_over_rollouts(name: str, ratios: tuple[float, float] | None) -> None:
    """One rollout has 2 tokens and one has 3; the means are as TRL's. `kl` is over tokens as everywhere."""
    objective = made(name)
    row = tokens([4.0, 1.0, 0.5, 0.5, 0.5], [1.0, 1.0, -1.0, -1.0, -1.0], rollout=torch.tensor([0, 0, 1, 1, 1]))
    figures = objective.metrics({key: float(value) for key, value in objective(row).sums.items()}, 5)
    figures |= objective.drift_metrics({key: float(value) for key, value in objective.drift(row).items()}, 5)
    if ratios is None:
        ratios = (4.0, 0.125)
        phi = (4**2 * math.exp(-9), 0.125**3 * math.exp(2 * 0.875))
        assert figures["vespo/phi_seq_mean"] == pytest.approx(sum(phi) / 2)
    else:
        assert [figures[f"clip_ratio/{side}_mean"] for side in ("low", "high", "region", "delta")] == [0.5, 0.5, 1, 0]
    assert figures["ratio"] == pytest.approx(sum(ratios) / 2)
    assert figures["ess"] == pytest.approx(sum(ratios) ** 2 / (2 * sum(ratio**2 for ratio in ratios)))
    assert figures["kl"] == pytest.approx((3 - 2 * LOG_2 + 3 * (LOG_2 - 0.5)) / 5, abs=1e-6)


def test_cispo_counts_what_trl_counts() -> None:
    sums = made("cispo", clip_high=4.0)(tokens([6.0, 6.0, 4.0], [1.0, -1.0, 1.0])).sums
    assert int(sums["cispo_clip_ratio"]) == 1


def test_dppo_counts_what_it_masks_by_side() -> None:
    sums = made("dppo")(tokens([3.0, 3.0, 1.1], [1.0, -1.0, 1.0])).sums
    sides = ("low", "high", "region")
    assert [int(sums[f"clip_ratio/{side}_mean"]) for side in sides] == [0, 1, 1]
