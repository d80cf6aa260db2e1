"""The rule of the proof: no alarm for rounding, one for each fault, whatever the seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weight_sync.server.proof_rule import (
    LEARNT,
    REMEMBERED,
    ROUNDING,
    UNUSUAL,
    Baseline,
    Evidence,
    Floats,
    judge,
)
from slipstream.weight_sync.weights.snapshot import LENGTH, probe_token_ids, rounds

PROBES = 63
SEEDS = st.integers(0, 2**32 - 1)
# What the types' servers differ by from a learner, standard deviation in nats, and the tolerance.
TYPES = [("float32", 1e-6, 1e-3), ("bfloat16", 0.02, 0.5), ("float16", 2e-3, 0.5)]
CHANGED = 1000


def floats(rng: np.random.Generator, scale: float) -> Floats:
    return rng.normal(0.0, scale, PROBES).astype(np.float32)


def usual_of(dtype: str, tolerance: float, noise: float) -> Baseline:
    usual = Baseline(dtype, tolerance)
    for _ in range(LEARNT):
        usual.learn(noise * 0.67)  # the median of |x| is 0.67 standard deviations
    return usual


@pytest.mark.parametrize(("dtype", "noise", "tolerance"), TYPES)
@given(seed=SEEDS, step=st.floats(-9, -1), scale=st.floats(0.3, 3.0))
def test_rounding_is_no_fault(dtype: str, noise: float, tolerance: float, seed: int, step: float, scale: float) -> None:
    """Over many publications, whatever a step moves, and even if the noise is not the same from time to time."""
    rng = np.random.default_rng(seed)
    usual = Baseline(dtype, tolerance)
    held = floats(rng, 3.0)
    for _ in range(REMEMBERED + 4):
        learner = held + floats(rng, 10.0**step)
        before = held + floats(rng, noise)
        served = learner + floats(rng, noise * scale)
        judgement = judge(Evidence(learner, served, before, CHANGED), tolerance, usual)
        assert judgement.fault is None
        usual.learn(judgement.difference)
        held = learner


@pytest.mark.parametrize(("dtype", "noise", "tolerance"), TYPES)
@given(seed=SEEDS, step=st.floats(-7, -2))
def test_a_swap_that_was_left_out_is_found_at_any_learning_rate(
    dtype: str, noise: float, tolerance: float, seed: int, step: float
) -> None:
    rng = np.random.default_rng(seed)
    before = floats(rng, 3.0)
    learner = before + floats(rng, noise) + floats(rng, 10.0**step)
    for usual in (Baseline(dtype, tolerance), usual_of(dtype, tolerance, noise)):
        judgement = judge(Evidence(learner, before, before, CHANGED), tolerance, usual)
        assert judgement.fault is not None
        assert judgement.told_apart


@given(seed=SEEDS, far=st.floats(6.0, 1e3))
def test_weights_of_before_that_round_otherwise_are_found_where_v_is_apart(seed: int, far: float) -> None:
    """No bit is the same, as on a GPU whose sums have no order; nor is it known how many weights changed."""
    rng = np.random.default_rng(seed)
    noise = 1e-6
    held = floats(rng, 3.0)
    learner = held + floats(rng, far * 4 * noise)
    served, before = held + floats(rng, noise), held + floats(rng, noise)
    judgement = judge(Evidence(learner, served, before, None), 1e-1, usual_of("float32", 1e-1, noise))
    assert judgement.fault is not None
    assert "nearer to what it held before" in judgement.fault


@pytest.mark.parametrize(
    ("count", "by", "allowed"),
    [(31, 1.5, True), (32, 0.45, False), (6, 15.0, True), (8, 1.7, False), (1, 15.9, True), (1, 16.1, False)],
)
def test_bounds_of_the_median_the_ninth_decile_and_the_maximum(count: int, by: float, allowed: bool) -> None:
    """The tolerance is 0.4: half of 63 may be beyond it, a tenth beyond 1.6, none beyond 16."""
    learner = np.full(PROBES, -1.0, dtype=np.float32)
    served = learner.copy()
    served[5 : 5 + count] -= by
    judgement = judge(Evidence(learner, served), 0.4, Baseline("bfloat16", 0.4))
    assert (judgement.fault is None) is allowed


@given(seed=SEEDS)
def test_the_tails_of_bfloat16_as_measured_are_no_fault(seed: int) -> None:
    """Differences as of 61 publications on an H200 (median 0.025, at most 0.45) and of 135 M on a CPU (at most 4.4)."""
    rng = np.random.default_rng(seed)
    usual = Baseline("bfloat16", 0.5)
    for _ in range(200):
        learner = floats(rng, 3.0)
        served = learner + (0.03 * rng.standard_t(4, PROBES)).clip(-0.45, 0.45).astype(np.float32)
        served[3] += 4.4
        judgement = judge(Evidence(learner, served), 0.5, usual)
        assert judgement.fault is None
        usual.learn(judgement.difference)


@pytest.mark.parametrize("served", [np.array([np.nan] * PROBES, dtype=np.float32), np.zeros(3, dtype=np.float32)])
def test_log_probs_that_are_missing_or_not_finite_are_a_fault(served: Floats) -> None:
    judgement = judge(Evidence(np.zeros(PROBES, dtype=np.float32), served), 10.0, Baseline("float32", 10.0))
    assert judgement.fault is not None
    assert judgement.max_abs_diff == float("inf")


def test_what_is_unusual_for_a_server_is_a_fault_within_the_tolerance() -> None:
    learner = np.zeros(PROBES, dtype=np.float32)
    served = learner + np.float32(UNUSUAL * 1.1e-6)
    assert judge(Evidence(learner, served), 1e-3, Baseline("float32", 1e-3)).fault is None  # not learnt yet
    fault = judge(Evidence(learner, served), 1e-3, usual_of("float32", 1e-3, ROUNDING["float32"])).fault
    assert fault is not None
    assert "usual" in fault


def test_one_token_that_a_router_sends_elsewhere_is_not_unusual() -> None:
    learner = np.zeros(PROBES, dtype=np.float32)
    served = learner.copy()
    served[7] = 0.4
    assert judge(Evidence(learner, served), 0.5, usual_of("bfloat16", 0.5, 0.01)).fault is None


@pytest.mark.parametrize("changed", [None, 3])
def test_log_probs_need_not_move_where_hardly_a_weight_did(changed: int | None) -> None:
    """The learning rate was 0, nearly none of the values changed in the wire type, or a quantised server rounds so."""
    same = floats(np.random.default_rng(0), 3.0)
    judgement = judge(Evidence(same, same, same, changed), 1e-3, usual_of("float32", 1e-3, 1e-6))
    assert judgement.fault is None
    assert not judgement.told_apart


@given(vocabulary=st.integers(2, 700), seed=st.integers(0, 9), first=st.integers(0, 50))
def test_probes_meet_every_id_as_an_input_and_as_a_prediction(vocabulary: int, seed: int, first: int) -> None:
    windows = rounds(vocabulary)
    start = first * windows
    probes = [probe_token_ids(vocabulary, number, seed) for number in range(start, start + windows)]
    assert {token for ids in probes for token in ids[:-1]} == set(range(vocabulary))
    assert {token for ids in probes for token in ids[1:]} == set(range(vocabulary))
    assert all(len(ids) == LENGTH for ids in probes)


def test_probes_are_the_same_at_every_call_and_others_with_each_publication() -> None:
    assert probe_token_ids(512, 3) == probe_token_ids(512, 3)
    assert len({tuple(probe_token_ids(512, number)) for number in range(40)}) == 40
    assert probe_token_ids(512, 3, seed=1) != probe_token_ids(512, 3)
