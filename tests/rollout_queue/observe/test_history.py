"""The history of a run on disk: read by the next queue, whole after a kill, bounded."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from protocol import history as stored
from protocol.status import LearnerStatus, Notice, Wait
from rollout_queue.observe import history
from rollout_queue.observe.history import WRITE_S, History
from tests.kit.status import status

MANY = 10**9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / stored.FOLDER


def fill(kept: History, first: int, count: int, every_s: float = WRITE_S) -> None:
    for number in range(first, first + count):
        learner = LearnerStatus(session=1, step=number, step_s=1.0, metrics={"reward": float(number)})
        notices = [Notice(number, "n", f"notice {number}", None, 0.0)] if number % 10 == 0 else []
        # Something that does not get smaller when it is compressed.
        waits = [Wait("w", random.Random(number).randbytes(50).hex(), 0.0)]
        now = status(uptime_s=number, step=number, learner=learner, notices=notices, waits=waits)
        kept.add(now, 100.0 + number * every_s)


def test_a_queue_that_starts_again_shows_what_was_before(folder: Path) -> None:
    before = History(folder, MANY)
    before.load()
    fill(before, 1, 50)
    before.close()
    after = History(folder, MANY)
    after.load()
    assert after.time.json() == before.time.json()
    assert after.steps.json() == before.steps.json()
    assert after.steps.json()["reward"] == [float(number) for number in range(1, 51)]
    assert list(after.events) == list(before.events)
    fill(after, 51, 10)
    assert len(after.time.json()["at"]) == 60
    assert [event.text for event in after.events][-2:] == ["notice 50", "notice 60"]
    after.close()
    assert len(stored.parts(folder)) == 2


def test_a_resume_at_an_earlier_step_takes_the_steps_that_are_made_again_out(folder: Path) -> None:
    kept = History(None, MANY)
    fill(kept, 1, 9)
    fill(kept, 4, 2)
    assert kept.steps.json()["step"] == [1, 2, 3, 4, 5]
    assert not folder.exists(), "without a folder nothing is written"


def test_events_are_written_at_once_and_a_status_at_times(folder: Path) -> None:
    kept = History(folder, MANY)
    fill(kept, 1, 20, every_s=WRITE_S / 5)
    found = list(stored.read(folder))
    assert sum(entry.status is not None for entry in found) == 4
    assert sum(entry.event is not None for entry in found) == len(kept.events) >= 3
    (part,) = stored.parts(folder)
    with gzip.open(part.path) as file:
        assert file.readline().startswith(b'{"at":'), "people can read it, too"
    kept.close()


@pytest.mark.parametrize("lost", [1, 7, 100, 1000])
def test_a_history_whose_end_is_lost_is_read_up_to_there(folder: Path, lost: int) -> None:
    kept = History(folder, MANY)
    fill(kept, 1, 40)
    (part,) = stored.parts(folder)
    whole = part.path.read_bytes()
    part.path.write_bytes(whole[:-lost])
    again = History(folder, MANY)
    again.load()
    steps = again.steps.json()["step"]
    assert steps == list(range(1, len(steps) + 1))
    assert 39 - lost // 50 <= len(steps) <= 40 - lost // 500
    part.path.write_bytes(b"no gzip")
    History(folder, MANY).load()


def test_a_long_history_is_thinned_out_and_keeps_its_whole_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_PART_BYTES", 4_000)
    most = 100_000
    kept = History(folder, most)
    for first in range(1, 2000, 50):
        fill(kept, first, 50)
        if kept.may_be_full:
            kept.make_room()
            assert sum(part.path.stat().st_size for part in stored.parts(folder)[:-1]) <= most
    times = [entry.at for entry in stored.read(folder) if entry.status is not None]
    assert times == sorted(times)
    assert times[-1] == 100.0 + 2000 * WRITE_S
    thinned = [part.thinned for part in stored.parts(folder)]
    assert thinned == sorted(thinned, reverse=True), "the newest hours are finest"
    assert thinned[0] > 1
    assert times[0] < 100.0 + 1000 * WRITE_S
    again = History(folder, most)
    again.load()
    assert again.time.json()["at"][-1] == times[-1]


def test_a_part_whose_thinning_was_killed_counts_once(folder: Path) -> None:
    kept = History(folder, MANY)
    fill(kept, 1, 10)
    kept.close()
    (part,) = stored.parts(folder)
    whole = part.path.read_bytes()
    history._thin(part)
    part.path.write_bytes(whole)
    assert [(part.number, part.thinned) for part in stored.parts(folder)] == [(1, 0)]
    assert sum(entry.status is not None for entry in stored.read(folder)) == 10


def test_a_disk_that_takes_no_more_ends_the_file_and_not_the_history(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file is in the way")
    kept = History(folder, MANY)
    fill(kept, 1, 5)
    assert kept.failure is not None
    assert kept.failure.startswith(f"the history of the run ends here: {folder}: ")
    assert len(kept.steps.json()["step"]) == 5
    kept.close()
