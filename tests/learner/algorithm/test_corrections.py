from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from slipstream.learner.algorithm import corrections
from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.corrections import CORRECTIONS, Corrected
from slipstream.learner.algorithm.step_data import Tokens
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import tokens

RATIOS = [0.4, 0.9, 1.0, 1.5, 6.0]
WEIGHING = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "decoupled"]


def stale(ratios: list[float], rollout: list[int] | None = None, **changes: Any) -> Tokens:
    """Tokens whose ratios proximal / behaviour are these, and p / proximal 1.1; each of weight 1/2."""
    behaviour = torch.full((len(ratios),), -2.0)
    proximal = behaviour + torch.tensor(ratios).log()
    numbers = torch.tensor(rollout or [0] * len(ratios))
    return tokens(
        ratios,
        [1.0] * len(ratios),
        [0.5] * len(ratios),
        logprobs=proximal + math.log(1.1),
        proximal=proximal,
        rollout=numbers,
        **changes,
    )


def correct(given: Tokens, name: str, **settings: float) -> Corrected:
    return corrections.build(LearnerSection(correction=name, **settings))(given)  # type: ignore[arg-type]


def figures(given: Tokens, name: str, **settings: float) -> dict[str, float]:
    correction = corrections.build(LearnerSection(correction=name, **settings))  # type: ignore[arg-type]
    result = correction(given)
    sums = {key: float(value) for key, value in {**result.sums, **result.peaks}.items()}
    return correction.metrics(sums, len(given.weights))


@pytest.mark.parametrize(
    ("name", "settings", "factors"),
    [
        ("none", {}, [1, 1, 1, 1, 1]),
        ("token_truncate", {}, [0.4, 0.9, 1, 1.5, 2]),
        ("token_truncate", {"correction_low": 0.5, "correction_high": 1.2}, [0.5, 0.9, 1, 1.2, 1.2]),
        ("token_mask", {}, [0, 0.9, 1, 1.5, 0]),
        ("token_mask", {"correction_low": 0, "correction_high": 1.2}, [0.4, 0.9, 1, 0, 0]),
        ("decoupled", {}, [0.4, 0.9, 1, 1.5, 5]),
    ],
)
def test_a_token_is_weighed_by_its_own_ratio(name: str, settings: dict[str, float], factors: list[float]) -> None:
    weights = correct(stale(RATIOS), name, **settings).tokens.weights
    torch.testing.assert_close(weights, torch.tensor(factors, dtype=torch.float32) / 2)


@pytest.mark.parametrize(
    ("name", "settings", "factors"),
    [
        # Three rollouts: 0.8 * 0.5 = 0.4, 1.5 * 1.4 = 2.1, 2 * 2 = 4; geometric means 0.632, 1.449, 2.
        ("sequence_truncate", {}, [0.4, 2.1, 3]),
        ("sequence_truncate", {"correction_low": 0.5}, [0.5, 2.1, 3]),
        ("sequence_mask", {}, [0.4, 2.1, 0]),
        ("sequence_mask", {"correction_low": 0.5}, [0, 2.1, 0]),
        ("geometric_mask", {}, [0, 0, 0]),
        ("geometric_mask", {"correction_low": 0.6, "correction_high": 1.5}, [1, 1, 0]),
    ],
)
def test_all_tokens_of_a_rollout_have_one_ratio(name: str, settings: dict[str, float], factors: list[float]) -> None:
    given = stale([0.8, 1.5, 2.0, 0.5, 1.4, 2.0], rollout=[0, 1, 2, 0, 1, 2])
    weights = correct(given, name, **settings).tokens.weights
    torch.testing.assert_close(weights, torch.tensor(factors * 2, dtype=torch.float32) / 2)


def test_what_weighs_moves_the_ratio_to_the_proximal_policy_and_what_only_masks_does_not() -> None:
    given = stale(RATIOS)
    for name in WEIGHING:
        changed = correct(given, name).tokens
        assert changed.old is given.proximal
        assert changed.old_drift is given.proximal_drift
    for name in ("none", "geometric_mask"):
        changed = correct(given, name).tokens
        assert changed.old is given.old
        assert changed.old_drift is given.old_drift


@pytest.mark.parametrize("name", ["none", *WEIGHING, "geometric_mask"])
def test_weight_and_ratio_make_one_importance_weight_together(name: str) -> None:
    """With the bounds wide open, the gradient is that of p / behaviour * A, by autograd in float64: nothing twice."""
    ratios, own = [0.7, 1.2, 1.6, 0.9], [1.1, 0.9, 1.05, 0.97]
    advantages, weights = [1.0, -2.0, 0.5, 1.5], [0.1, 0.2, 0.3, 0.4]
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    proximal = behaviour + torch.tensor(ratios).log()
    logprobs = proximal + torch.tensor(own).log()
    given = tokens(
        [1.0] * 4, advantages, weights, behaviour=behaviour, proximal=proximal, logprobs=logprobs,
        rollout=torch.tensor([0, 0, 1, 1]),
    )  # fmt: skip
    bounds = {} if name == "none" else {"correction_low": 0.0, "correction_high": 1e6}
    section = LearnerSection(correction=name, clip_low=0.999, clip_high=1000, delta="none", **bounds)  # type: ignore[arg-type]
    Algorithm(section, longest=9)(given).losses.sum().backward()

    plain = logprobs.double().detach().requires_grad_()
    of_token = (plain - behaviour.double()).exp()
    product = torch.tensor(ratios, dtype=torch.float64)
    whole = torch.tensor([0.7 * 1.2, 0.7 * 1.2, 1.6 * 0.9, 1.6 * 0.9], dtype=torch.float64)
    ratio = of_token * whole / product if name.startswith("sequence") else of_token
    (-ratio * torch.tensor(advantages).double() * torch.tensor(weights).double()).sum().backward()
    assert given.logprobs.grad is not None
    torch.testing.assert_close(given.logprobs.grad.double(), plain.grad, rtol=1e-5, atol=1e-7)


def test_decoupled_ppo_clips_against_the_proximal_policy() -> None:
    """p / behaviour is far outside of the clip, p / proximal is not: plain PPO has no gradient, decoupled PPO has."""

    def slope(name: str) -> float:
        given = stale([2.0])
        Algorithm(LearnerSection(correction=name), longest=9)(given).losses.sum().backward()  # type: ignore[arg-type]
        assert given.logprobs.grad is not None
        return given.logprobs.grad.item()

    assert slope("none") == 0
    assert slope("decoupled") == pytest.approx(-0.5 * 2.0 * 1.1)


def test_figures_of_tokens() -> None:
    used = [0.9, 1.0, 1.5, 0, 0]
    assert figures(stale(RATIOS), "token_mask") == pytest.approx(
        {
            "sampling/importance_sampling_ratio/min": 0,
            "sampling/importance_sampling_ratio/mean": sum(used) / 5,
            "sampling/importance_sampling_ratio/max": 1.5,
            "correction/masked": 2 / 5,
            "correction/ess": sum(used) ** 2 / (5 * sum(value**2 for value in used)),
        }
    )
    truncated = figures(stale(RATIOS), "token_truncate")
    assert truncated["sampling/importance_sampling_ratio/min"] == pytest.approx(0.4)
    assert truncated["sampling/importance_sampling_ratio/max"] == 2
    assert truncated["correction/truncated"] == pytest.approx(1 / 5)


def test_figures_count_a_rollout_once_however_long_it_is() -> None:
    given = stale([2.0, 2.0, 1.0, 1.0, 1.0, 1.0], rollout=[0, 0, 1, 1, 1, 1])
    assert figures(given, "sequence_mask") == pytest.approx(
        {
            "sampling/importance_sampling_ratio/min": 0,
            "sampling/importance_sampling_ratio/mean": 0.5,
            "sampling/importance_sampling_ratio/max": 1,
            "correction/masked": 0.5,
            "correction/ess": 0.5,
        }
    )
    shown = figures(given, "geometric_mask")
    assert shown["correction/geometric_ratio/max"] == pytest.approx(2)
    assert shown["correction/masked"] == 0.5


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "reinforce", "sequence_clip"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_kl_and_ess_are_to_the_sampler_whatever_is_corrected(objective: str, correction: str) -> None:
    """The ratio is the objective's own: to the policy that the correction weighs towards."""
    given = stale([4.0, 1.0, 1.0, 1.0], rollout=[0, 0, 1, 1])

    def shown(**settings: str) -> dict[str, float | None]:
        algorithm = Algorithm(LearnerSection.model_validate({"objective": objective, **settings}), longest=9)
        result = algorithm(given)
        return algorithm.metrics({name: float(value) for name, value in {**result.sums, **result.peaks}.items()})

    plain, corrected = shown(), shown(correction=correction)
    assert plain["kl"] == pytest.approx((3.4 - math.log(4.4) + 3 * (0.1 - math.log(1.1))) / 4)
    assert (corrected["kl"], corrected["ess"]) == (plain["kl"], plain["ess"])
    assert plain["ess"] is not None
    assert plain["ess"] < 0.95
    if correction not in ("none", "geometric_mask"):
        assert corrected["ratio"] == pytest.approx(1.21 if objective == "sequence_clip" else 1.1)


def test_a_step_whose_every_token_is_masked_has_figures_all_the_same() -> None:
    algorithm = Algorithm(LearnerSection(correction="geometric_mask"), longest=9)
    result = algorithm(stale([2.0, 2.0]))
    shown = algorithm.metrics({name: float(value) for name, value in {**result.sums, **result.peaks}.items()})
    assert not result.losses.any()
    assert shown["correction/masked"] == 1
    assert {"ratio", "clip_ratio/low_mean"} <= {name for name, value in shown.items() if value is None}
    assert [shown["kl"], shown["ess"]] == pytest.approx([1.2 - math.log(2.2), 1.0])
    kept = algorithm(stale([1.0, 1.0]))
    sums = {name: float(value) for name, value in {**kept.sums, **kept.peaks}.items()}
    assert tuple(algorithm.metrics(sums)) == tuple(shown)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction": "token_mask", "correction_low": 1.0, "correction_high": 1.0}, r"no room for any ratio but 1"),
        ({"correction": "token_mask", "correction_low": 1.5}, r"less than or equal to 1"),
        ({"correction": "token_mask", "correction_high": 0.5}, r"greater than or equal to 1"),
    ],
)
def test_settings_that_would_do_nothing_or_too_much_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LearnerSection(**settings)
