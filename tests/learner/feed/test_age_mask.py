from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.feed.judged_groups import loss_weights
from slipstream.protocol.messages import FinishReason, Group
from tests.kit import group, segment

VERSIONS = st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=30)
ENDS = st.sampled_from(get_args(FinishReason))


def ending(made: Group, ends: Sequence[FinishReason]) -> Group:
    """The group with rollouts that ended so."""
    for rollout, end in zip(made.rollouts, ends, strict=True):
        rollout.finish_reason = end
    return made


@settings(deadline=None)
@given(VERSIONS, st.integers(8, 12), st.integers(0, 12), st.sampled_from(["mask", "drop"]))
def test_i2_no_token_beyond_the_bound_has_weight(
    versions: list[int | None], version: int, bound: int, overage: Literal["mask", "drop"]
) -> None:
    weights = loss_weights(group("t", [0, 1], versions), version, bound, overage)
    for of_segment in weights.weights:
        for token, weight in zip(versions, of_segment, strict=True):
            assert weight in (0.0, 1.0)
            if token is None or version - token > bound:
                assert weight == 0.0
    assert weights.staleness_max <= bound


@settings(deadline=None)
@given(
    VERSIONS,
    st.integers(8, 12),
    st.integers(0, 12),
    st.sampled_from(["mask", "drop"]),
    st.booleans(),
    st.lists(ENDS, min_size=2, max_size=2),
)
def test_i4_every_sampled_token_is_trained_or_masked_for_a_counted_reason(
    versions: list[int | None],
    version: int,
    bound: int,
    overage: Literal["mask", "drop"],
    mask_truncated: bool,
    ends: list[FinishReason],
) -> None:
    sampled = ending(group("t", [0, 1], versions), ends)
    weights = loss_weights(sampled, version, bound, overage, mask_truncated)
    assert weights.tokens_trained == sum(weight.sum() for weight in weights.weights)
    assert weights.tokens_trained + sum(weights.masked.values()) == sampled.sampled_tokens
    cut_off = [mask_truncated and end in ("length", "context") for end in ends]
    assert weights.masked.get("truncated", 0) == sum(cut_off) * sampled.rollouts[0].sampled_tokens
    assert not any(weight.any() for weight, cut in zip(weights.weights, cut_off, strict=True) if cut)
    for ages, weight in zip(weights.staleness, weights.weights, strict=True):
        assert ages.tolist() == [0 if token is None else version - token for token in versions]
        assert not weight[ages > bound].any()


@pytest.mark.parametrize(
    ("overage", "expected"),
    [("mask", [0, 0, 1, 0, 1]), ("drop", [0, 0, 0, 0, 0])],
)
def test_overage_masks_the_old_tokens_or_all(overage: Literal["mask", "drop"], expected: list[int]) -> None:
    weights = loss_weights(group("t", [0, 1], [None, 3, 4, None, 5]), 6, 2, overage)
    np.testing.assert_array_equal(weights.weights[0], expected)


def test_staleness_is_counted_over_the_tokens_that_train() -> None:
    weights = loss_weights(group("t", [0, 1], [None, 1, 4, 5, 6]), 6, 2, "mask")
    assert (weights.staleness_sum, weights.staleness_max) == (2 * (2 + 1 + 0), 2)
    assert weights.masked == {"overage": 2}


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([None, 6, 6, 6], [0, 1, 1, 1]),
        ([None, 5, 6, 6], [0, 0, 0, 0]),  # an update landed in the turn: keys and values of version 5
        ([None, 5, 5, None, 6, 6], [0, 0, 0, 0, 1, 1]),  # between turns
        ([None, 5, 6, None, 6], [0, 0, 0, 0, 1]),
        ([None, 6, 5, 6], [0, 1, 0, 0]),  # continued at a server that was behind
        ([5, 6], [0, 0]),
        ([6, 6], [1, 1]),
        ([None, 2, 6, None, 6], [0, 0, 0, 0, 1]),  # the turn's beginning is too old to train
    ],
)
def test_fresh_tokens_are_of_turns_that_their_version_began(versions: list[int | None], expected: list[int]) -> None:
    for of_segment in loss_weights(group("t", [0, 1], versions), 6, 2, "mask").fresh:
        assert of_segment.tolist() == [bool(one) for one in expected]


def test_a_segment_begins_a_turn_of_its_own() -> None:
    made = group("t", [0, 1], [None, 6])
    first, second = made.rollouts
    first.segments = [segment([None, 5]), segment([6, 6])]
    second.segments = [segment([6, 6]), segment([6, 6])]
    fresh = loss_weights(made, 6, 2, "mask").fresh
    assert [of_segment.tolist() for of_segment in fresh] == [[False, False], [True, True], [True, True], [True, True]]


def test_a_sampled_first_token_has_nothing_to_predict_it() -> None:
    weights = loss_weights(group("t", [0, 1], [5, 5]), 5, 2, "mask")
    np.testing.assert_array_equal(weights.weights[0], [0, 1])
    assert weights.masked == {"no_context": 2}


@pytest.mark.parametrize(
    ("overage", "weights", "masked"),
    [
        ("mask", [[0, 0, 0], [0, 1, 1]], {"truncated": 2}),
        ("drop", [[0, 0, 0], [0, 1, 1]], {"truncated": 2}),
    ],
)
def test_a_masked_rollout_s_old_tokens_are_truncated_and_cost_the_others_nothing(
    overage: Literal["mask", "drop"], weights: list[list[float]], masked: dict[str, int]
) -> None:
    mixed = ending(group("t", [0, 1], [None, 5, 5]), ["length", "stop"])
    mixed.rollouts[0].segments = [segment([None, 0, 5])]
    judged = loss_weights(mixed, 5, 2, overage, mask_truncated=True)
    assert [weight.tolist() for weight in judged.weights] == weights
    assert judged.masked == masked
