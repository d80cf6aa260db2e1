"""The kit's processes: an end is seen, a death of another fails the test, and so does a run in which nothing moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.stage import is_running
from tests.kit import supervised
from tests.kit.supervised import Processes, processes


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as started:
        yield started
        pids = [child.pid for child in started.running.values()]
    assert not any(map(is_running, pids))


def test_an_end_is_seen(started: Processes) -> None:
    started.start("it", "bash", "-c", "echo $WORD; exit 3", env={"WORD": "a word"})
    assert started.wait("it", started.logged) == 3
    assert started.log("it") == "a word\n"


def test_a_kill_takes_the_whole_group(started: Processes) -> None:
    started.start("it", "bash", "-c", "trap '' TERM; sleep 300 & echo $!; wait")
    while not started.log("it"):
        pass
    started.kill("it")
    assert not is_running(int(started.log("it")))
    assert not started.running


def test_the_death_of_another_fails_the_test_with_its_log(started: Processes) -> None:
    started.start("it", "sleep", "300")
    started.start("other", "bash", "-c", "echo last words; exit 1")
    with pytest.raises(pytest.fail.Exception, match="other ended with 1:\nlast words"):
        started.wait("it", started.logged)


def test_a_run_in_which_nothing_moves_fails_the_test(started: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "STILL_S", 0.5)
    started.start("it", "bash", "-c", "echo a line; sleep 300")
    with pytest.raises(pytest.fail.Exception, match="it does not end:\n--- it\na line"):
        started.wait("it", started.logged)
    moves = iter(range(10**9))
    started.start("done soon", "sleep", "1")
    assert started.wait("done soon", lambda: next(moves)) == 0
