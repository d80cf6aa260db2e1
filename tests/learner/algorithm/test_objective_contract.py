"""What every objective must keep, whatever its formula."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm import objectives
from slipstream.learner.algorithm.objectives import OBJECTIVES, Objective
from slipstream.learner.algorithm.step_data import Tokens
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import joined, tokens


@pytest.fixture(params=OBJECTIVES)
def objective(request: pytest.FixtureRequest) -> Objective:
    return objectives.build(LearnerSection(objective=request.param))


def some_tokens(seed: int, count: int = 40) -> Tokens:
    """A row as training meets it: ratios near 1 and far from it, a quarter of the tokens without weight."""
    random = np.random.default_rng(seed)
    return tokens(np.exp(random.normal(0, 0.5, count)), random.normal(size=count), random.random(count) < 0.75)


def test_the_run_file_offers_every_variant() -> None:
    assert set(OBJECTIVES) == set(get_args(LearnerSection.model_fields["objective"].annotation))


def test_a_loss_a_token(objective: Objective) -> None:
    row = some_tokens(0)
    losses = objective(row).losses
    assert (losses.dtype, losses.shape) == (torch.float32, row.weights.shape)
    assert torch.isfinite(losses).all()


@pytest.mark.parametrize("log_ratio", [-1e9, -100.0, 0.0, 100.0, 1e9])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_a_token_without_weight_has_no_loss_no_gradient_and_no_part_in_the_sums(
    objective: Objective, log_ratio: float, advantage: float
) -> None:
    """However wild its ratio: 0 * inf would be NaN."""
    behaviour = torch.tensor([-1.0, -1.0 - log_ratio])
    apart = torch.arange(2)
    both = tokens([1, 1], [1.0, advantage], [1.0, 0.0], behaviour=behaviour, logprobs=-torch.ones(2), rollout=apart)
    result = objective(both)
    result.losses.sum().backward()
    assert result.losses[1] == 0
    assert both.logprobs.grad is not None
    assert both.logprobs.grad[1] == 0
    alone = objective(tokens([1], [1.0], behaviour=-torch.ones(1), logprobs=-torch.ones(1)))
    assert {name: float(value) for name, value in result.sums.items()} == {
        name: float(value) for name, value in alone.sums.items()
    }


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_a_token_without_weight_may_be_impossible(objective: Objective, advantage: float) -> None:
    apart = torch.arange(2)
    impossible = torch.tensor([-1.0, -torch.inf])
    row = tokens([1, 1], [advantage] * 2, [1.0, 0.0], behaviour=-torch.ones(2), logprobs=impossible, rollout=apart)
    result = objective(row)
    result.losses.sum().backward()
    assert row.logprobs.grad is not None
    assert (result.losses[1], row.logprobs.grad[1]) == (0, 0)
    assert all(torch.isfinite(value) for value in [result.losses[0], *result.sums.values()])
    assert all(torch.isfinite(value) and not value.requires_grad for value in objective.drift(row).values())


@pytest.mark.parametrize("log_ratio", [-1e9, -100.0, 100.0, 1e9])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_a_wild_ratio_with_weight_stays_finite(objective: Objective, log_ratio: float, advantage: float) -> None:
    row = tokens([1], [advantage], behaviour=torch.tensor([-1.0 - log_ratio]), logprobs=-torch.ones(1))
    result = objective(row)
    result.losses.sum().backward()
    assert row.logprobs.grad is not None
    assert torch.isfinite(torch.stack([result.losses[0], row.logprobs.grad[0]])).all()
    assert all(torch.isfinite(value) for value in [*result.sums.values(), *objective.drift(row).values()])


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 0.5])
def test_at_ratio_1_the_gradient_is_the_policy_gradient_s(objective: Objective, advantage: float) -> None:
    row = tokens([1.0], [advantage], [1.0])
    objective(row).losses.sum().backward()
    assert row.logprobs.grad is not None
    assert row.logprobs.grad.item() == pytest.approx(-advantage)


def test_what_is_given_has_no_gradient(objective: Objective) -> None:
    row = some_tokens(0)
    given = [row.behaviour, row.advantages, row.weights]
    objective(row).losses.sum().backward()
    assert [value.grad for value in given] == [None] * 3


def test_packing_cannot_change_the_losses_or_the_sums(objective: Objective) -> None:
    first, second = some_tokens(1), some_tokens(2, count=7)
    apart, together = [objective(first), objective(second)], objective(joined(first, second))
    torch.testing.assert_close(together.losses, torch.cat([result.losses for result in apart]))
    for name, value in together.sums.items():
        torch.testing.assert_close(value, apart[0].sums[name] + apart[1].sums[name], msg=name)
    drifts = [objective.drift(first), objective.drift(second)]
    for name, value in objective.drift(joined(first, second)).items():
        torch.testing.assert_close(value, drifts[0][name] + drifts[1][name], msg=name)


def test_sums_are_scalars_without_a_gradient_whose_names_never_change(objective: Objective) -> None:
    rows = [some_tokens(1), some_tokens(2, count=1), tokens([1.0, 3.0], [0.0, 0.0], [0.0, 0.0])]
    results = [objective(row) for row in rows]
    assert len({tuple(result.sums) for result in results}) == 1
    for value in (value for result in results for value in result.sums.values()):
        assert value.shape == ()
        assert not value.requires_grad
        assert torch.isfinite(value)


def test_figures_are_finite_and_have_names_that_never_change(objective: Objective) -> None:
    names = set()
    for seed in range(3):
        row = some_tokens(seed)
        sums = {name: float(value) for name, value in objective(row).sums.items()}
        figures = objective.metrics(sums, int(row.weights.sum()))
        assert all(math.isfinite(value) for value in figures.values())
        names.add(tuple(figures))
    assert len(names) == 1
