"""What is decided about several servers and several snapshots, without any of them: tables and properties."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.messages import ServerState
from slipstream.weight_sync.fleet.decisions import Standing, find_lag, is_slow, patience_s, retry_pause_s
from slipstream.weight_sync.fleet.publications import Publications, ServerMetrics
from slipstream.weight_sync.fleet.snapshots import MAX_ON_THEIR_WAY, Snapshots
from tests.kit.sync import probe

SE, ST = ServerState.SERVING, ServerState.STALE
FIGURES = ServerMetrics(0.1, 0.01, 0.2, 1e-6)


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((4,), value))]


@pytest.mark.parametrize(
    ("state", "version", "others", "max_staleness", "stale"),
    [
        (SE, 4, [(SE, 5)], 0, True),
        (SE, 4, [(SE, 5)], 1, True),
        (SE, 4, [(SE, 7)], 4, False),
        (SE, 4, [(SE, 8)], 4, True),
        (SE, 4, [(ST, 8)], 4, False),  # nobody else serves: it is the best there is
        (SE, 4, [], 0, False),
        (ST, 4, [(SE, 8)], 4, False),  # it is already
        (ServerState.SYNCING, None, [(SE, 8)], 0, False),
    ],
)
def test_a_server_is_stale_only_behind_another_that_serves(
    state: ServerState,
    version: int | None,
    others: list[tuple[ServerState, int]],
    max_staleness: int,
    stale: bool,
) -> None:
    standings = [Standing(f"o{i}", of, has) for i, (of, has) in enumerate(others)]
    mine = Standing("a", state, version)
    found = find_lag(mine, [mine, *standings], 0, max_staleness)
    assert (found is not None and found.too_far) is stale


def test_the_grace_of_a_server_that_is_behind_is_twice_what_the_other_took() -> None:
    found = find_lag(Standing("a", SE, 1), [Standing("b", SE, 2, took_s=3.0)], 2, 0)
    assert found is not None
    assert (found.versions, found.ahead, found.grace_s) == (1, "b", 6.0)


def test_how_far_behind_a_server_is_counts_from_the_version_that_the_learner_has() -> None:
    found = find_lag(Standing("a", SE, 1), [Standing("b", SE, 2)], 5, 4)
    assert found is not None
    assert (found.versions, found.too_far) == (4, True)


def test_a_server_is_slow_by_its_steps_and_does_not_flap() -> None:
    was, seen = False, []
    for step_s in (0.1, 3.9, 4.0, 2.1, 3.9, 1.9, 3.9):
        was = is_slow(step_s, was)
        seen.append(was)
    assert seen == [False, False, True, True, True, False, False]


@pytest.mark.parametrize(("step_s", "steps", "patience"), [(0.0, 3.0, 10.0), (2.0, 3.0, 10.0), (50.0, 3.0, 150.0)])
def test_patience_follows_the_steps_and_has_a_minimum(step_s: float, steps: float, patience: float) -> None:
    assert patience_s(10.0, step_s, steps) == patience


def test_pauses_grow_and_have_an_end() -> None:
    assert [retry_pause_s(failures) for failures in (1, 2, 3, 100)] == [2.0, 4.0, 8.0, 60.0]


@given(
    st.integers(1, 3),
    st.lists(st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.integers(0, 3))), min_size=1, max_size=40),
)
def test_every_version_counts_once_or_is_skipped_and_counted(quorum: int, events: list[tuple[str, int] | None]) -> None:
    """None: a version is handed over; else a server gets the version that is so many behind the newest."""
    publications, newest = Publications(quorum), 0
    for event in events:
        if event is None:
            newest += 1
            publications.handed(newest, 0.0)
        elif newest - event[1] > 0:
            publications.proven(event[0], newest - event[1], FIGURES, {})
        counted = [record.version for record in publications.records]
        assert counted == sorted(set(counted))
        assert sum(record.skipped + 1 for record in publications.records) == (counted[-1] if counted else 0)
        assert all(len(record.servers_ok) >= quorum for record in publications.records)


def test_at_most_three_snapshots_are_alive_and_what_no_server_took_is_overtaken() -> None:
    pool = Snapshots()
    pool.fill(1, weights(1), probe(), None)
    first = pool.take("a")
    pool.fill(2, weights(2), probe(), None)
    second = pool.take("b")
    for version in (3, 4, 5):
        pool.fill(version, weights(version), probe(), None)
        assert pool.alive == MAX_ON_THEIR_WAY + 1
        assert pool.take("c") is None  # two are on their way
    assert first is not None
    assert second is not None
    pool.give_back("a", first, whole=True)
    newest = pool.take("c")
    assert newest is not None
    assert [of.version for of in (first, second, newest)] == [1, 2, 5]
    assert float(second.manifest.views(second.flat)["w"][0]) == 2.0
    assert float(newest.manifest.views(newest.flat)["w"][0]) == 5.0


@pytest.mark.parametrize("whole", [True, False])
def test_a_buffer_is_filled_again_only_when_no_thread_can_read_it(whole: bool) -> None:
    pool = Snapshots()
    pool.fill(1, weights(1), probe(), None)
    taken = pool.take("a")
    assert taken is not None
    pool.fill(2, weights(2), probe(), None)
    pool.give_back("a", taken, whole)
    pool.fill(3, weights(3), probe(), None)
    pool.fill(4, weights(4), probe(), None)
    assert (float(taken.manifest.views(taken.flat)["w"][0]) != 1.0) is whole


def test_who_keeps_others_from_the_newest_is_named_and_in_the_end_forgotten() -> None:
    pool, freed = Snapshots(), []
    pool.freed = lambda: freed.append(1)
    for version, name in ((1, "a"), (2, "b")):
        pool.fill(version, weights(version), probe(), None)
        pool.take(name)
    pool.fill(3, weights(3), probe(), None)
    assert pool.held_up(0.0) == []
    assert pool.take("c") is None
    assert pool.held_up(0.0) == ["a"]
    assert pool.held_up(60.0) == []
    assert pool.forget_oldest() == 1
    assert freed
    assert pool.take("c") is not None


def test_beside_the_copy_a_snapshot_costs_less_than_a_millisecond() -> None:
    pool, costs = Snapshots(), []
    for version in range(50):
        began = time.perf_counter()
        pool.fill(version, weights(1.0), probe(), None)
        costs.append(time.perf_counter() - began)
    assert statistics.median(costs) < 1e-3
