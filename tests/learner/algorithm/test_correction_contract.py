"""What every correction must keep, whatever its formula."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm import corrections
from slipstream.learner.algorithm.corrections import CORRECTIONS, Corrected, Correction
from slipstream.learner.algorithm.step_data import Tokens
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import joined, tokens


@pytest.fixture(params=CORRECTIONS)
def correction(request: pytest.FixtureRequest) -> Correction:
    return corrections.build(LearnerSection(correction=request.param))


def some_tokens(seed: int, count: int = 40) -> Tokens:
    """A row as training meets it: several rollouts, a quarter of the tokens without weight, proximal between."""
    random = np.random.default_rng(seed)
    ratios = np.exp(random.normal(0, 0.5, count))
    behaviour = torch.from_numpy(random.normal(-3, 1, count).astype(np.float32))
    apart = torch.from_numpy(random.normal(0, 0.3, count).astype(np.float32))
    return tokens(
        ratios,
        random.normal(size=count),
        random.random(count) < 0.75,
        behaviour=behaviour,
        logprobs=behaviour + torch.from_numpy(np.log(ratios).astype(np.float32)),
        proximal=behaviour + apart,
        rollout=torch.arange(count) // 9,
    )


def part(row: Tokens, where: slice) -> Tokens:
    """A part of a row, which knows of its whole rollouts what the whole row does."""
    return Tokens(**{name: None if value is None else value[where] for name, value in vars(row).items()})


def assert_equal(together: Corrected, apart: list[Corrected]) -> None:
    for name, value in vars(together.tokens).items():
        if value is not None and name != "rollout":
            pieces = torch.cat([getattr(result.tokens, name) for result in apart])
            torch.testing.assert_close(value, pieces, msg=lambda text, n=name: f"{n}: {text}")
    for name, value in together.sums.items():
        torch.testing.assert_close(value, sum(result.sums[name] for result in apart), msg=name)
    for name, value in together.peaks.items():
        torch.testing.assert_close(value, torch.stack([result.peaks[name] for result in apart]).amax(), msg=name)


def test_the_run_file_offers_every_variant() -> None:
    assert set(CORRECTIONS) == set(get_args(LearnerSection.model_fields["correction"].annotation))


def test_it_changes_nothing_but_weights_and_what_a_ratio_is_taken_against(correction: Correction) -> None:
    row = some_tokens(0)
    changed = correction(row).tokens
    for name in vars(row).keys() - {"weights", "old", "old_drift"}:
        assert getattr(changed, name) is getattr(row, name), name
    assert (changed.weights.dtype, changed.weights.shape) == (torch.float32, row.weights.shape)
    assert (changed.weights >= 0).all()
    assert not changed.weights[row.weights == 0].any()


def test_what_the_sampler_s_own_version_sampled_keeps_its_weight_exactly(correction: Correction) -> None:
    """Where the proximal policy is the one that sampled, the ratio is 1: nothing is weighed, masked or rounded."""
    row = some_tokens(0)
    fresh = row.but(proximal=row.behaviour, proximal_drift=torch.zeros_like(row.drift))
    changed = correction(fresh).tokens
    assert torch.equal(changed.weights, row.weights)
    assert torch.equal(changed.old, row.old)
    assert torch.equal(changed.old_drift, row.old_drift)


def test_no_gradient_goes_through_a_weight(correction: Correction) -> None:
    """The policy's own log-probs are the only thing with a gradient, and a weight must not read them."""
    changed = correction(some_tokens(0)).tokens
    for value in (changed.weights, changed.old, changed.old_drift):
        assert not value.requires_grad


@pytest.mark.parametrize("distance", [-1e9, -100.0, 100.0, 1e9])
def test_a_wild_ratio_stays_finite(correction: Correction, distance: float) -> None:
    behaviour = torch.tensor([-1.0, -1.0])
    row = tokens([1, 1], [1, -1], behaviour=behaviour, proximal=behaviour + torch.tensor([distance, 0.0]))
    result = correction(row)
    assert torch.isfinite(result.tokens.weights).all()
    assert all(torch.isfinite(value) for value in (*result.sums.values(), *result.peaks.values()))


@pytest.mark.parametrize("distance", [-1e9, -100.0, 0.0, 100.0, 1e9])
def test_a_token_without_weight_stays_without_and_has_no_part_in_the_sums(
    correction: Correction, distance: float
) -> None:
    proximal = torch.tensor([-1.9, -2.0 + distance])
    both = correction(tokens([1, 1], [1, 1], [1, 0], proximal=proximal, rollout=torch.arange(2)))
    alone = correction(tokens([1], [1], proximal=proximal[:1]))
    assert both.tokens.weights[1] == 0
    assert {name: float(value) for name, value in both.sums.items()} == {
        name: float(value) for name, value in alone.sums.items()
    }
    assert both.peaks == alone.peaks


def test_a_proximal_policy_that_is_not_a_number_is_not_hidden_by_a_mask(correction: Correction) -> None:
    """The step has to end in DivergedError: a mask that ate it would train on nothing, forever."""
    row = tokens([1.0], [1.0], logprobs=torch.tensor([torch.nan]), proximal=torch.tensor([torch.nan]))
    weight = correction(row).tokens.weights[0]
    assert weight.isnan() or weight == 1


def test_packing_cannot_change_weights_or_sums(correction: Correction) -> None:
    first, second = some_tokens(1), some_tokens(2, count=7)
    assert_equal(correction(joined(first, second)), [correction(first), correction(second)])


@pytest.mark.parametrize("cut", [1, 13, 39])
def test_a_rollout_may_stand_in_several_rows(correction: Correction, cut: int) -> None:
    row = some_tokens(3)
    assert_equal(correction(row), [correction(part(row, slice(cut))), correction(part(row, slice(cut, None)))])


def test_sums_are_scalars_without_a_gradient_whose_names_never_change(correction: Correction) -> None:
    rows = [some_tokens(1), some_tokens(2, count=1), tokens([1.0, 3.0], [0.0, 0.0], [0.0, 0.0])]
    results = [correction(row) for row in rows]
    assert len({(tuple(result.sums), tuple(result.peaks)) for result in results}) == 1
    for value in (value for result in results for value in (*result.sums.values(), *result.peaks.values())):
        assert value.shape == ()
        assert not value.requires_grad


def test_figures_are_finite_and_have_names_that_never_change(correction: Correction) -> None:
    names = set()
    for seed in range(3):
        row = some_tokens(seed)
        result = correction(row)
        sums = {name: float(value) for name, value in {**result.sums, **result.peaks}.items()}
        figures = correction.metrics(sums, int((row.weights > 0).sum()))
        assert all(math.isfinite(value) for value in figures.values())
        names.add(tuple(figures))
    assert len(names) == 1
