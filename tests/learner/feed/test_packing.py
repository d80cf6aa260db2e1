from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.packing import PackedRow, Sample, assign, even, pack, pack_row
from slipstream.learner.model.logprobs import TokenScores
from slipstream.learner.model.policy import Policy
from slipstream.learner.training.passes import Known, Preparation
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import gradients, sample, step_rollouts

LENGTHS = st.lists(st.integers(2, 24), min_size=1, max_size=8)
ALGORITHM = Algorithm(LearnerSection(), longest=64)


class Policies(NamedTuple):
    packed: Policy
    plain: Policy


@pytest.fixture(scope="module")
def policies(make_policy: Callable[..., Policy]) -> Policies:
    """Ours, and one with transformers' own attention; the same weights in both."""
    return Policies(make_policy(), make_policy("eager"))


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 200))
def test_rows_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    rows = assign(lengths, budget)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[i] for i in row) <= budget
        assert [lengths[i] for i in row] == sorted((lengths[i] for i in row), reverse=True)
    fewest = -(-sum(lengths) // budget)
    assert len(rows) <= 2 * fewest


def test_best_fit_fills_the_smallest_gap() -> None:
    assert assign([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 9)), min_size=1, max_size=40), st.integers(50, 200))
def test_even_rows_hold_the_same_units_within_the_budget(units: list[tuple[int, float]], budget: int) -> None:
    lengths, costs = [tokens for tokens, _ in units], [tokens * share for tokens, share in units]
    bins = assign(lengths, budget)
    rows = even(bins, lengths, costs, budget)
    assert len(rows) == len(bins)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= budget for row in rows)


def test_rows_are_even_in_cost_not_in_tokens() -> None:
    # Best fit has rows of cost 60 and 20; two units of 20 tokens cost as much as one of 40.
    assert even([[0, 1, 2], [3]], [20, 20, 20, 20], [10, 10, 20, 40], 60) == [[3], [2, 0, 1]]


def test_units_that_fit_in_no_even_way_stay_as_they_were() -> None:
    bins = assign([6, 4, 5, 5], 10)
    assert even(bins, [6, 4, 5, 5], [1, 9, 10, 2], 10) == bins == [[0, 1], [2, 3]]


def test_long_paths_have_fewer_tokens_beside_them() -> None:
    lengths = [4001, *[401] * 24]
    samples = [replace(sample(length, 1, seed), group=seed) for seed, length in enumerate(lengths)]
    with_long, others = sorted(pack(samples, 8192), key=lambda row: -row.longest)
    assert others.tokens > 1.1 * with_long.tokens


def test_a_sequence_beyond_the_budget_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"sequence of 6\d tokens .* learner.token_budget = 64"):
        pack([sample(67, 3, 0)], 64)


def test_a_row_points_at_the_token_before_each_one_with_weight() -> None:
    first, second = _sample([1, 2, 3, 4], [0, 0, 1, 1], 0), _sample([1, 2, 5], [0, 1, 1], 1)
    row = pack_row([second, first])
    assert row.input_ids.tolist() == [[1, 2, 3]]
    assert row.position_ids.tolist() == [[0, 1, 2]]
    assert row.rollout.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    pairs = [(int(row.positions[place]), int(row.targets[place])) for place in row.scored]
    of_first, of_second = [(1, 3), (2, 4)], [(0, 2), (1, 5)]
    assert pairs == (of_first + of_second if row.rollout[0] == 0 else of_second + of_first)
    assert (row.longest, row.raw_tokens) == (3, 5)


def test_a_pair_that_samples_share_is_scored_once() -> None:
    row = pack_row([_sample([1, 2, 3], [0, 1, 1], 0), _sample([1, 2, 3], [0, 1, 1], 1)])
    assert len(row.targets) == 2
    assert sorted(row.scored.tolist()) == [0, 0, 1, 1]
    assert sorted(row.rollout.tolist()) == [0, 0, 1, 1]


def test_what_follows_the_last_token_with_weight_is_not_computed() -> None:
    assert _sample([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 0]).forwarded.tolist() == [1, 2, 3]


def test_a_group_stands_in_one_row_and_one_above_the_budget_is_cut() -> None:
    group = [_sample([1, 2, 3, token, 9], [0, 0, 0, 0, 1]) for token in range(10, 16)]
    (row,) = pack(group, 12)
    assert (row.tokens, row.raw_tokens) == (9, 24)
    rows = pack(group, 6)
    assert sum(len(row.scored) for row in rows) == 6
    assert all(row.tokens <= 6 for row in rows)
    assert len(rows) == 2


def test_attention_that_knows_whole_sequences_only_gets_them() -> None:
    group = [_sample([1, 2, 3, token, 9], [0, 0, 0, 0, 1]) for token in (10, 11, 11)]
    (row,) = pack(group, 64, branches=False)
    assert row.starts == [0, 4, 8]
    assert row.reach == row.starts[1:]


def _sample(tokens: list[int], weights: list[float], rollout: int = 0) -> Sample:
    ids, loss = np.array(tokens, dtype=np.int32), np.array(weights, dtype=np.float32)
    return Sample(ids, -loss, loss, np.zeros_like(ids), loss > 0, rollout)


@settings(max_examples=8, deadline=None)
@example(lengths=[24, 17, 9, 8, 8, 3, 2], budget=40, order=random.Random(0))
@given(lengths=LENGTHS, budget=st.integers(24, 120), order=st.randoms(use_true_random=False))
def test_packed_loss_and_gradients_equal_unpacked_ones(
    policies: Policies, lengths: list[int], budget: int, order: random.Random
) -> None:
    """Whatever the budget and the order; the unpacked side runs transformers' own attention and full logits."""
    samples = [sample(length, 1 + length // 3, seed, rollout=seed) for seed, length in enumerate(lengths)]
    # Two thirds share a beginning with their neighbour, and some are equal.
    for seed, item in enumerate(samples):
        if seed % 3:
            size = min(len(item), len(samples[seed - 1])) * (seed % 3) // 2
            item.token_ids[:size] = samples[seed - 1].token_ids[:size]
    samples = [item for item in samples if item.weights.any()]
    if not samples:
        return
    rollouts = step_rollouts(samples)
    expected = _train(policies.plain, [pack_row([item]) for item in samples], rollouts, _whole_logprobs)
    order.shuffle(samples)
    actual = _train(policies.packed, pack(samples, budget), rollouts, lambda policy, row: policy(row).logprobs)
    assert actual == pytest.approx(expected, abs=1e-5)
    plain, packed = gradients(policies.plain), gradients(policies.packed)
    assert set(packed) == set(plain)
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, plain[name], atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def _train(
    policy: Policy,
    rows: list[PackedRow],
    rollouts: StepRollouts,
    logprobs: Callable[[Policy, PackedRow], torch.Tensor],
) -> float:
    policy.zero_grad()
    preparation = Preparation(ALGORITHM, rollouts, rows, [Known()] * len(rows), torch.device("cpu"))
    total = 0.0
    for row in rows:
        scores = TokenScores(logprobs(policy, row), torch.zeros(len(row.scored)))
        loss = ALGORITHM(preparation.tokens(row, scores, Known())).losses.sum()
        loss.backward()
        total += loss.item()
    return total


def _whole_logprobs(policy: Policy, row: PackedRow) -> torch.Tensor:
    logits = policy.model(input_ids=row.input_ids, use_cache=False).logits[0]
    return logits.log_softmax(-1)[row.positions, row.targets][row.scored]


def test_each_token_learns_from_what_its_own_teacher_said() -> None:
    """Two rows may have one prompt, and their teachers another one each (`teacher.prompt`)."""
    one = sample(6, 2, 0)
    given = [
        replace(
            one,
            rollout=number,
            teacher_ids=np.arange(12).reshape(6, 2) + 20 * number,
            teacher_top=np.full((6, 2), -1.0 - number, np.float32),
        )
        for number in range(2)
    ]
    row = pack_row(given)
    assert row.teacher_ids is not None
    assert row.teacher_top is not None
    (trained,) = one.weights.nonzero()
    for number, of in enumerate(given):
        assert of.teacher_ids is not None
        mine = row.rollout == number
        assert row.teacher_ids[row.scored][mine].tolist() == of.teacher_ids[trained].tolist()
        assert row.teacher_top[mine].tolist() == [[-1.0 - number] * 2] * len(trained)
