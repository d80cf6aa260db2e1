"""Schedules are replayable and shrink to what they need; links hurt as they say; and a short night on fakes."""

from __future__ import annotations

import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slipstream.protocol.messages import VersionSpan
from tests.kit.chosen import commit
from tests.kit.messages import segment
from tests.nights import schedule as schedules
from tests.nights.audit import trend, turns_of
from tests.nights.faults import BY_NAME, FAULTS, Place, possible, quick
from tests.nights.fleet import Fleet
from tests.nights.link import link
from tests.nights.night import play
from tests.nights.schedule import Strike, draw, shrink
from tests.nights.watch import Watch, alike, told


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


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_engine_that_is_left_is_found_although_its_environment_is_gone(tmp_path: Path) -> None:
    engine = "subprocess.Popen(['VLLM::EngineCore', '60'], executable=shutil.which('sleep'), env={}).wait()"
    fleet = Fleet(tmp_path, tmp_path / "model", fake=True, seed=0)
    server = fleet.spawn("far", [sys.executable, "-c", f"import shutil, subprocess; {engine}"])
    try:
        fleet.beside["far"] = server
        wait(lambda: "far's engine" in fleet.with_engines())
        server.kill()
        server.wait()
        assert fleet.left()
    finally:
        fleet.close()


def test_a_step_takes_the_median_of_those_that_were_made() -> None:
    heard = Watch("http://127.0.0.1:9", "token")
    heard.close()
    assert heard.step_s() == 0.0
    # Two at once, a restart, and one that goes back to a checkpoint.
    heard.steps = [(0.0, 0), (8.0, 1), (28.0, 3), (150.0, 1), (160.0, 2), (290.0, 3)]
    assert heard.step_s() == 10.0


def test_lines_of_steps_tell_of_no_fault() -> None:
    heard = Watch("http://127.0.0.1:9", "token")
    try:
        heard.add("terminal", "step     401/1000000 | reward 0.812 | 0.24 s, 13% waiting | depth 3.2")
        heard.add("terminal", "! w0: reward accuracy: no answer within 6 s")
        assert str(heard.first("reward .*wait|reward .*within", 0.0)).endswith("within 6 s")
    finally:
        heard.close()


def series(hours: float, of: Callable[[float], float], noise: float = 2e6) -> list[tuple[float, float]]:
    """A look each 10 s, as those of a night are recorded: with noise, and a collector that frees 8 MB now and then."""
    rng = np.random.default_rng(0)
    at = np.arange(0.0, 3600 * hours, 10.0)
    return [(t, 5e8 + of(t / 3600) + rng.normal(0, noise) + 8e6 * (t / 97 % 1)) for t in at]


@pytest.mark.parametrize(
    ("grows", "leaks"),
    [
        (lambda hours: 1e6 * hours, True),
        (lambda hours: 20e6 * hours, True),
        (lambda hours: 0.0, False),
        (lambda hours: -5e6 * hours, False),
        # What warms up grows by less and less.
        (lambda hours: 50e6 * (1 - np.exp(-hours / 0.5)), False),
    ],
)
def test_a_leak_of_a_megabyte_an_hour_is_found_and_nothing_else(grows: Callable[[float], float], leaks: bool) -> None:
    found = trend(series(6.0, grows))
    assert found is not None
    assert found.leaks is leaks
    if leaks:
        assert found.per_hour == pytest.approx(grows(1.0), rel=0.5)


def test_a_short_series_has_no_trend() -> None:
    assert trend(series(0.05, lambda hours: 0.0)) is None


def test_a_fault_that_is_told_once_while_it_lasts_does_not_come_too_soon() -> None:
    for faults in (possible("fake"), [BY_NAME["tool hangs"]]):
        drawn = draw(3, 3600, 5.0, faults)
        for name in {"tool hangs", "reward hangs"} & {strike.fault for strike in drawn}:
            at = [strike.at_s for strike in drawn if strike.fault == name]
            assert len(at) > 3
            assert min(np.diff(at)) >= BY_NAME[name].apart_s - 0.1  # times are rounded


def test_a_turn_is_what_was_sampled_without_a_gap() -> None:
    of = segment((None, 1, 1, 2, None, 2, 3))
    assert [[(span.version, span.start, span.end) for span in turn] for turn in turns_of(of)] == [
        [(1, 1, 3), (2, 3, 4)],
        [(2, 5, 6), (3, 6, 7)],
    ]
    assert all(isinstance(span, VersionSpan) for turn in turns_of(of) for span in turn)


def test_lines_are_alike_by_their_figures_and_not_by_their_names() -> None:
    assert alike("server vllm-0 is stale: 4 versions") == alike("server vllm-0 is stale: 5 versions")
    assert alike("server vllm-0 is stale: paused") != alike("server vllm-1 is stale: paused")


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
@pytest.mark.timeout(900)
def test_a_minute_of_faults_on_fakes_breaks_no_rule() -> None:
    """The commit draws them; `python -m tests.nights --fake` plays longer ones, CI each night."""
    seed = zlib.crc32(commit().encode())
    outcome = play(draw(seed, 60.0, 3.5, quick("fake")), seed, fake=True, every_s=3.5)
    assert not outcome.broken, (seed, outcome.broken)
    done = [of for of in outcome.strikes if of.skipped is None]
    assert len(done) > 10
    assert all(of.line for of in done if of.strike.of.says)
    assert outcome.labels.tokens > 100


@pytest.mark.wide
@pytest.mark.timeout(1500)
def test_what_takes_a_run_minutes_breaks_no_rule_either() -> None:
    names = ("kill learner", "wrong swap", "two learners", "truncated checkpoint", "tool hangs", "reward hangs")
    outcome = play([Strike(8.0 * place, name, place, 5.0) for place, name in enumerate(names)], 0, True, 8.0)
    assert not outcome.broken, outcome.broken
    assert all(of.line for of in outcome.strikes if of.strike.of.says)
