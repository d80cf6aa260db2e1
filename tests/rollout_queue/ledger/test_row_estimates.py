"""Rows that teach: the formula by which rows are chosen, its floor, its scale, and what a restart may not change."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.protocol import reasons
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import MAX_METRIC, Fingerprint
from slipstream.protocol.status import RowsStatus
from slipstream.rollout_queue.ledger import tickets
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import (
    Decision,
    Refusal,
    RowOutcome,
    RowRecord,
    RunState,
    StoreContents,
    TicketRecord,
)
from slipstream.rollout_queue.ledger.row_estimates import MAX_ROWS, PASS_EVERY, RECENT_GROUPS, RowEstimates
from tests.kit import config, group
from tests.kit.messages import group_of_roles


def learnable(**task: object) -> RunConfig:
    return config(task={"order": "learnable", **task})


def data(rows: int | None, **parts: int) -> Fingerprint:
    return Fingerprint("1", "t", "c", {}, rows=rows, parts=parts)


def estimates(rows: int, records: Sequence[RowRecord] = ()) -> RowEstimates:
    return RowEstimates(learnable(), records, data(rows))


def went(of: RowEstimates, row: int, *rewards: float, times: int = 1) -> None:
    """Let groups of a row come in."""
    for _ in range(times):
        of.apply(Decision(rows=(of.after(row, RowOutcome.of(group(rewards=rewards))),)))


def shares(of: RowEstimates, rows: int, count: int = 20_000) -> np.ndarray:
    """Return how often each row is chosen, apart from the pass through all rows."""
    chosen = Counter(of.row_of(index) for index in range(count) if index % PASS_EVERY)
    return np.array([chosen[row] for row in range(rows)]) / chosen.total()


@pytest.mark.parametrize(
    ("rewards", "mean", "variance"),
    [
        ((0.0, 1.0), 0.5, 0.5),
        ((0.0, 0.0, 0.0, 1.0), 0.25, 0.25),  # 3/16 x 4/3
        ((2.0, 2.0), 2.0, 0.0),
        ((0.1 + 0.2, 0.3), 0.3, 0.0),
        ((-MAX_METRIC, MAX_METRIC), 0.0, 2 * MAX_METRIC**2),
    ],
)
def test_the_outcome_of_a_group_is_its_mean_and_the_variance_of_the_sample(
    rewards: tuple[float, ...], mean: float, variance: float
) -> None:
    found = RowOutcome.of(group(rewards=rewards))
    assert (found.mean, found.variance) == (pytest.approx(mean), pytest.approx(variance))


def test_the_rewards_of_roles_are_compared_within_each_role() -> None:
    flat = group_of_roles(("buyer", 0.0), ("buyer", 0.0), ("seller", 1.0), ("seller", 1.0))
    assert RowOutcome.of(flat) == RowOutcome(0.5, 0.0)
    differ = group_of_roles(("buyer", 0.0), ("buyer", 1.0), ("seller", 1.0), ("seller", 1.0))
    assert RowOutcome.of(differ).variance == pytest.approx(0.25)


def test_rows_are_drawn_in_proportion_to_the_formula() -> None:
    of = estimates(5)
    went(of, 0, 0.0, 0.0, times=3)
    went(of, 1, 0.0, 1.0, times=1)
    went(of, 2, 0.0, 1.0, times=20)
    went(of, 3, 0.0, 0.5, times=2)
    # n and v of each row; the last was never tried.
    groups = np.array([3, 1, RECENT_GROUPS, 2, 0])
    variance = np.array([0, 0.5, 0.5, 0.125, 0])
    weights = (groups * variance + variance[:4].mean()) / (groups + 1)
    assert shares(of, 5) == pytest.approx(weights / weights.sum(), abs=0.015)


def test_rows_are_drawn_in_proportion_to_p_times_1_minus_p_once_they_are_known() -> None:
    random = np.random.default_rng(0)
    success = np.array([0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0])
    of = estimates(len(success))
    found = np.zeros(len(success))
    for _ in range(12):
        for row, p in enumerate(success):
            for _ in range(RECENT_GROUPS):
                went(of, row, *map(float, random.random(16) < p))
        found += shares(of, len(success), 1000) / 12
    wanted = success * (1 - success)
    assert found[2:5] / found[3] == pytest.approx(wanted[2:5] / wanted[3], abs=0.12)
    assert max(found[0], found[6]) < found[1] < found[2]


def test_a_row_that_went_from_never_to_always_does_not_look_learnable() -> None:
    of = estimates(2)
    for row, late in ((0, (1.0, 1.0)), (1, (0.0, 1.0))):
        went(of, row, 0.0, 0.0, times=RECENT_GROUPS)
        went(of, row, *late, times=RECENT_GROUPS)
    assert of.get(0).spread == 0
    assert 0.4 < of.get(0).mean < 0.7
    assert shares(of, 2)[1] > 0.8


@given(st.integers(1, 2500), st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.data())
@settings(max_examples=25, deadline=None)
def test_every_row_comes_with_at_least_the_floors_share(rows: int, seed: int, first: int, draw: st.DataObject) -> None:
    """Whatever the estimates are: each row once in every `PASS_EVERY` x rows tickets."""
    records = [RowRecord(row, 3, 0.5, draw.draw(st.sampled_from([0.0, 1e-30, 1.0, 1e30]))) for row in range(rows)[:9]]
    of = RowEstimates(config(run={"seed": seed}, task={"order": "learnable"}), records, data(rows))
    passes = [index for index in range(first, first + PASS_EVERY * rows) if index % PASS_EVERY == 0]
    assert sorted(of.row_of(index) for index in passes) == list(range(rows))
    assert all(0 <= of.row_of(index) < rows for index in range(first, first + 20))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(-3, 3), min_size=2, max_size=4))), st.integers(-60, 60)
)
@settings(max_examples=50, deadline=None)
def test_rewards_of_any_scale_choose_the_same_rows(groups: list[tuple[int, list[int]]], power: int) -> None:
    one, scaled = estimates(6), estimates(6)
    for row, rewards in groups:
        went(one, row, *map(float, rewards))
        went(scaled, row, *(reward * 2.0**power for reward in rewards))
    assert [one.row_of(index) for index in range(60)] == [scaled.row_of(index) for index in range(60)]


@given(st.lists(st.tuples(st.integers(0, 2999), st.floats(-1e30, 1e30), st.floats(0, 1e30))), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_rows_chosen_after_a_crash_are_those_chosen_without(went_so: list[tuple[int, float, float]], at: int) -> None:
    """Sums are those of the estimates alone, in whatever order these came about."""
    live, stored = estimates(3000), dict[int, RowRecord]()
    for row, mean, spread in went_so:
        record = live.after(row, RowOutcome(mean, spread**2))
        stored[row] = record
        live.apply(Decision(rows=(record,)))
    fresh = estimates(3000, list(stored.values()))
    assert [live.row_of(index) for index in range(at, at + 50)] == [fresh.row_of(index) for index in range(at, at + 50)]
    assert all(live.get(row) == fresh.get(row) == record for row, record in stored.items())


def test_an_index_keeps_its_row_unless_the_data_set_has_shrunk() -> None:
    of = estimates(10)
    assert of.row_of(7, before=3) == 3
    of.apply(Decision(run=RunState(data=data(3))))
    assert of.row_of(7, before=3) < 3
    went(of, 9, 0.0, 1.0)  # a group of before
    assert {of.row_of(index) for index in range(200)} == {0, 1, 2}
    of.apply(Decision(run=RunState(data=data(10))))
    assert of.get(9).tried == 1
    assert 9 in {of.row_of(index) for index in range(50)}


def test_i1_a_row_that_is_issued_again_is_the_same_one_whatever_was_learnt_meanwhile() -> None:
    ledger = Ledger(learnable(), StoreContents(run=RunState(data=data(1000))), 0.0)

    def apply(decision: Decision) -> tuple[TicketRecord, ...]:
        ledger.apply(decision, 0.0)
        return decision.tickets

    issued = apply(tickets.issue(ledger, "w", 20))
    assert ledger.rows is not None
    for row in range(1000):
        apply(Decision(rows=(ledger.rows.after(row, RowOutcome(0.5, float(row == 7))),)))
    for record in issued:
        apply(tickets.fail(ledger, record, "failed:judge", retryable=True))
    again = apply(tickets.issue(ledger, "w", 21))
    assert [record.attempt for record in again] == [1] * 20 + [0]
    assert [record.row for record in again[:20]] == [record.row for record in issued]
    assert [tickets.message(ledger, record).row for record in again] == [record.row for record in again]


def test_no_row_is_chosen_before_the_data_set_is_known() -> None:
    of = RowEstimates(learnable(), [RowRecord(2, 1, 1.0, 1.0)], None)
    assert not of.is_ready
    assert of.status() is None
    with pytest.raises(ValueError, match="no worker has named the data set"):
        of.row_of(0)
    of.apply(Decision(run=RunState(data=data(4))))
    assert of.get(2).tried == 1
    assert of.row_of(0) < 4


def test_each_part_of_a_mix_has_its_share_and_its_own_choice() -> None:
    task = {"mix": {"b": 0.7, "none": 0.0, "a": 0.3}}
    of = RowEstimates(learnable(**task), [], data(9, a=2, b=4, none=3))
    for _ in range(4):
        went(of, 0, 0.0, 1.0)  # of a
        went(of, 5, 0.0, 1.0)  # of b
        for row in (1, 2, 3, 4):
            went(of, row, 1.0, 1.0)
    chosen = Counter(of.row_of(index) for index in range(3000))
    assert sum(chosen[row] for row in (0, 1)) == 900
    assert sum(chosen[row] for row in (2, 3, 4, 5)) == 2100
    assert chosen[0] > 2 * chosen[1]
    assert chosen[5] > 2 * max(chosen[row] for row in (2, 3, 4))


@pytest.mark.parametrize(
    ("given_data", "mix"),
    [
        (data(None), {}),
        (data(0), {}),
        (data(MAX_ROWS + 1), {}),
        (data(3), {"a": 1.0}),
        (data(3, a=3), {"a": 0.5, "b": 0.5}),
        (data(3, a=2), {"a": 1.0}),
    ],
)
def test_a_worker_of_whose_data_set_no_row_can_be_chosen_is_refused(
    given_data: Fingerprint, mix: dict[str, float]
) -> None:
    of = RowEstimates(learnable(mix=mix), [], None)
    with pytest.raises(Refusal, match="does not fit") as refused:
        of.check("w", given_data)
    assert refused.value.reason == reasons.FINGERPRINT
    RowEstimates(learnable(mix={"a": 1.0, "b": 0.0}), [], None).check("w", data(3, a=3))


def test_the_status_counts_rows_by_their_mean_reward() -> None:
    of = estimates(100)
    assert of.status() == RowsStatus(100)
    for row, rewards in enumerate([(0.0, 0.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]):
        went(of, row, *rewards)
    assert of.status() == RowsStatus(100, 4, 1, 0.0, 1.0, [2, 0, 0, 0, 0, 1, 0, 0, 0, 1])


def test_memory_stays_within_sixteen_bytes_a_row() -> None:
    rows = 200_000
    tracemalloc.start()
    try:
        of = estimates(rows)
        went(of, rows - 1, 0.0, 1.0)
        of.row_of(1)
        assert tracemalloc.get_traced_memory()[0] < 16 * rows
    finally:
        tracemalloc.stop()
