"""Schedules are replayable and shrink to what they need; links hurt as they say; and a short night on fakes."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from protocol.messages import VersionSpan
from tests.kit.messages import segment
from tests.nights import schedule as schedules
from tests.nights.audit import turns_of
from tests.nights.faults import FAULTS, Place, possible
from tests.nights.link import link
from tests.nights.night import play
from tests.nights.schedule import Strike, draw, shrink
from tests.nights.watch import told


@pytest.mark.parametrize("place", ["real", "fake", "simulated"])
def test_a_seed_draws_one_schedule_in_which_each_fault_comes_before_any_comes_twice(
    tmp_path: Path, place: Place
) -> None:
    faults = possible(place)
    drawn = draw(7, 100 * len(faults), 30.0, faults)
    assert drawn == draw(7, 100 * len(faults), 30.0, faults) != draw(8, 100 * len(faults), 30.0, faults)
    assert {strike.fault for strike in drawn[: len(faults)]} == {fault.name for fault in faults}
    assert [strike.at_s for strike in drawn] == sorted(strike.at_s for strike in drawn)
    assert all(strike.of.lasts_s[0] <= strike.lasts_s <= strike.of.lasts_s[1] for strike in drawn)
    schedules.save(drawn, tmp_path / "schedule")
    assert schedules.load(tmp_path / "schedule") == drawn


@pytest.mark.parametrize("needed", [{3}, {0, 19}, {4, 5, 11}])
def test_a_failing_schedule_shrinks_to_the_strikes_that_it_needs(needed: set[int]) -> None:
    whole = [Strike(float(number), FAULTS[number % len(FAULTS)].name, number) for number in range(20)]
    tries = 0

    def fails(part: list[Strike]) -> bool:
        nonlocal tries
        tries += 1
        return needed <= {strike.which for strike in part}

    found = shrink(whole, fails)
    assert {strike.which for strike in found} == needed
    assert tries <= 64
    assert [strike.at_s for strike in schedules.closer(found, 5.0)] == [5.0 * place for place in range(len(needed))]


def test_no_two_faults_have_one_name() -> None:
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1


def test_a_link_that_is_cut_is_silent_and_goes_on_when_it_is_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, link(server.getsockname()[1]) as between:

        def echo() -> None:
            there, _ = server.accept()
            with there:
                while data := there.recv(1024):
                    there.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        with socket.create_connection(("127.0.0.1", between.port), timeout=10) as client:
            client.sendall(b"one")
            assert client.recv(16) == b"one"
            between.state = "cut"
            client.sendall(b"two")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(16)
            between.state = "whole"
            client.settimeout(10)
            assert client.recv(16) == b"two"


def test_a_turn_is_what_was_sampled_without_a_gap() -> None:
    of = segment((None, 1, 1, 2, None, 2, 3))
    assert [[(span.version, span.start, span.end) for span in turn] for turn in turns_of(of)] == [
        [(1, 1, 3), (2, 3, 4)],
        [(2, 5, 6), (3, 6, 7)],
    ]
    assert all(isinstance(span, VersionSpan) for turn in turns_of(of) for span in turn)


def test_a_status_tells_of_servers_workers_and_causes() -> None:
    status = {
        "servers": [
            {"name": "a", "state": "serving", "reason": None, "waits_for": None},
            {"name": "b", "state": "stale", "reason": "paused by a person", "waits_for": None},
        ],
        "workers": [{"worker_id": "w", "does": "refused", "reason": "other rows"}],
        "waits": [{"who": "learner", "what": "groups", "since_s": 9.0}],
        "notices": [{"who": "w", "text": "a tool hangs"}],
        "diagnosis": [{"about": "tool", "text": "it fails"}],
        "stall": {"stalled": True, "why": "nobody"},
        "gave_up": None,
    }
    assert [*told(status)] == [
        "server b is stale: paused by a person",
        "worker w is refused: other rows",
        "learner waits for groups",
        "notice w: a tool hangs",
        "diagnosis tool: it fails",
        "stalled: nobody",
    ]


@pytest.mark.wide
@pytest.mark.timeout(1500)
def test_a_short_night_on_fakes_breaks_no_rule() -> None:
    """Kills, pauses, a wrong swap and a clock that is set, within two minutes of a run."""
    names = ("kill queue", "kill worker", "kill server", "pause", "wrong swap", "clock one hour ahead", "two queues")
    schedule = [Strike(8.0 * place, name, place, 5.0) for place, name in enumerate(names)]
    began = time.monotonic()
    outcome = play(schedule, seed=0, fake=True, every_s=8.0)
    assert not outcome.broken, (outcome.broken, time.monotonic() - began)
    assert outcome.labels.tokens > 100
    assert all(of.line for of in outcome.strikes if of.strike.of.says)
