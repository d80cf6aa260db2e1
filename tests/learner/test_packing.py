from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from learner.algorithm import objectives
from learner.algorithm.objectives.base import Tokens
from learner.feed.packing import PackedRow, Sample, assign, pack, pack_row
from learner.model.policy import Policy
from protocol.config import LearnerSection
from tests.kit.learner import gradients, sample

LENGTHS = st.lists(st.integers(2, 24), min_size=1, max_size=8)
OBJECTIVE = objectives.build(LearnerSection())


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


def test_a_sequence_beyond_the_budget_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"sequence of 65 tokens .* learner.token_budget = 64"):
        pack([sample(65, 3, 0)], 64)


def test_a_row_points_at_the_token_before_each_sampled_one() -> None:
    first, second = sample(5, 2, seed=1), sample(3, 0, seed=2)
    row = pack_row([first, second])
    assert row.cu_seqlens.tolist() == [0, 5, 8]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert row.positions.tolist() == [1, 2, 3, 5, 6]
    np.testing.assert_array_equal(row.targets, [*first.token_ids[2:], *second.token_ids[1:]])
    np.testing.assert_array_equal(row.weights, [*first.weights[2:], *second.weights[1:]])
    np.testing.assert_array_equal(row.staleness, [*first.staleness[2:], *second.staleness[1:]])
    np.testing.assert_array_equal(row.behaviour, [*first.behaviour[2:], *second.behaviour[1:]])
    assert row.max_seqlen == 5


def test_trimming_cuts_what_follows_the_last_token_with_weight() -> None:
    whole = sample(6, 2, 0)
    weights = np.array([0, 0, 1, 1, 0, 0], dtype=np.float32)
    assert len(Sample(whole.token_ids, whole.sampled, whole.behaviour, weights, whole.staleness, 1.0).trimmed()) == 4


@settings(max_examples=8, deadline=None)
@example(lengths=[24, 17, 9, 8, 8, 3, 2], budget=40, order=random.Random(0))
@given(lengths=LENGTHS, budget=st.integers(24, 120), order=st.randoms(use_true_random=False))
def test_packed_loss_and_gradients_equal_unpacked_ones(
    policies: Policies, lengths: list[int], budget: int, order: random.Random
) -> None:
    """Whatever the budget and the order; the unpacked side runs transformers' own attention and full logits."""
    samples = [sample(length, 1 + length // 3, seed) for seed, length in enumerate(lengths)]
    expected = _train(policies.plain, [pack_row([item]) for item in samples], _whole_logprobs)
    order.shuffle(samples)
    actual = _train(policies.packed, pack(samples, budget), lambda policy, row: policy(row).logprobs)
    assert actual == pytest.approx(expected, abs=1e-5)
    plain, packed = gradients(policies.plain), gradients(policies.packed)
    assert set(packed) == set(plain)
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, plain[name], atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def _train(policy: Policy, rows: list[PackedRow], logprobs: Callable[[Policy, PackedRow], torch.Tensor]) -> float:
    policy.zero_grad()
    normaliser = max(1, int(sum(row.weights.sum() for row in rows)))
    total = 0.0
    for row in rows:
        tokens = Tokens(logprobs(policy, row), row.behaviour, row.advantages, row.weights, row.staleness)
        loss = OBJECTIVE(tokens).losses.sum() / normaliser
        loss.backward()
        total += loss.item()
    return total


def _whole_logprobs(policy: Policy, row: PackedRow) -> torch.Tensor:
    logits = policy.model(input_ids=row.input_ids, use_cache=False).logits[0]
    return logits.log_softmax(-1)[row.positions, row.targets]
