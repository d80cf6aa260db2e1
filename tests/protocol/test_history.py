"""The history of a run as columns."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.history import MAX_POINTS, Columns, step_row, time_row
from slipstream.protocol.status import LearnerStatus
from tests.kit.status import status, worker


@given(st.integers(1, 5 * MAX_POINTS), st.integers(1, 3))
def test_columns_are_bounded_and_cover_everything_with_the_newest_at_their_end(count: int, gap: int) -> None:
    columns = Columns("step")
    for step in range(count):
        columns.add({"step": step * gap, "reward": float(step)})
    steps = columns.json()["step"]
    assert len(steps) <= MAX_POINTS
    assert steps[0] == 0
    assert steps[-1] == (count - 1) * gap
    assert steps == sorted(set(steps))
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps[:-1])}
    assert len(gaps) <= 1, "evenly"


def test_a_column_has_a_gap_where_a_row_lacks_it_and_a_row_of_the_same_key_replaces_the_one_before() -> None:
    columns = Columns("step")
    columns.add({"step": 1, "kl": 0.5})
    columns.add({"step": 2, "reward": 1.0})
    columns.add({"step": 2, "reward": 2.0})
    assert columns.json() == {"step": [1, 2], "kl": [0.5, None], "reward": [None, 2.0]}
    columns.forget_from(2)
    columns.add({"step": 2, "reward": 3.0})
    assert columns.json()["reward"] == [None, 3.0]


def test_rows_are_taken_from_the_status() -> None:
    workers = [worker("a", does="generating", episodes_in_flight=3), worker("b", does="left", episodes_in_flight=9)]
    now = status(step=3, workers=workers, drops={"overage": 2, "expired": 1})
    row = time_row(5.0, now)
    assert (row["at"], row["step"], row["workers"], row["workers_generating"]) == (5.0, 3, 1, 1)
    assert (row["episodes_open"], row["drops_total"], row["drop/overage"]) == (3, 3, 2)
    assert step_row(5.0, now) is None
    learner = LearnerStatus(step=3, step_s=2.0, wait_share=0.25, metrics={"reward": 0.5})
    assert step_row(6.0, msgspec.structs.replace(now, learner=learner)) == {
        "step": 3,
        "at": 6.0,
        "step_time": 2.0,
        "wait_s": 0.5,
        "reward": 0.5,
    }
