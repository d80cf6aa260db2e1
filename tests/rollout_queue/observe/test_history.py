"""The history of a run: on disk, read by the next queue, whole after a kill, bounded; and the events in it."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import msgspec
import pytest

from slipstream.protocol import history as stored
from slipstream.protocol.history import time_row
from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import Cause, Evaluation, LearnerStatus, Notice, Stall, Status, Wait
from slipstream.rollout_queue.observe import history
from slipstream.rollout_queue.observe.history import WRITE_S, History, between
from tests.kit.status import server, status, worker

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
    assert after.columns.time.json() == before.columns.time.json()
    assert after.columns.steps.json() == before.columns.steps.json()
    assert after.columns.steps.json()["reward"] == [float(number) for number in range(1, 51)]
    assert list(after.events) == list(before.events)
    fill(after, 51, 10)
    assert len(after.columns.time.json()["at"]) == 60
    assert [event.text for event in after.events][-3:] == ["notice 50", "the queue started", "notice 60"]
    after.close()
    assert len(stored.parts(folder)) == 2
    soon = History(folder, MANY)
    soon.load()
    soon.add(status(uptime_s=70.0, step=60), 999.0)
    assert soon.events[-1].text == "the queue started", "however long the one before ran"


def test_a_resume_at_an_earlier_step_takes_the_steps_that_are_made_again_out(folder: Path) -> None:
    kept = History(None, MANY)
    fill(kept, 1, 9)
    fill(kept, 4, 2)
    assert kept.columns.steps.json()["step"] == [1, 2, 3, 4, 5]
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
    again = History(folder, MANY)
    again.load()
    # Those of the newest seconds went with the queue.
    assert [again.columns.steps.json()[name] for name in ("step", "at", "reward")] == [
        kept.columns.steps.json()[name][:16] for name in ("step", "at", "reward")
    ]


@pytest.mark.parametrize("lost", [1, 7, 100, 1000])
def test_a_history_whose_end_is_lost_is_read_up_to_there(folder: Path, lost: int) -> None:
    kept = History(folder, MANY)
    fill(kept, 1, 40)
    (part,) = stored.parts(folder)
    whole = part.path.read_bytes()
    part.path.write_bytes(whole[:-lost])
    again = History(folder, MANY)
    again.load()
    steps = again.columns.steps.json()["step"]
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
    assert again.columns.time.json()["at"][-1] == times[-1]


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


def test_a_disk_that_takes_no_more_leaves_a_gap_until_there_is_room(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file is in the way")
    kept = History(folder, MANY)
    fill(kept, 1, 5)
    assert kept.failure is not None
    assert kept.failure.startswith(f"the run's history, {folder}, has a gap until this is over: ")
    assert len(kept.columns.steps.json()["step"]) == 5
    folder.unlink()
    kept.add(status(step=6), 1e6)
    assert kept.failure is None
    kept.close()
    assert [entry.status.step for entry in stored.read(folder) if entry.status is not None] == [6]


def test_what_is_no_entry_is_left_out_of_a_history_and_what_is_no_file_too(folder: Path) -> None:
    kept = History(folder, MANY)
    fill(kept, 1, 3)
    kept.close()
    (part,) = stored.parts(folder)
    lines = gzip.decompress(part.path.read_bytes()).splitlines()
    newer = b'{"at":1.0,"event":{"at":1.0,"kind":"of a newer release","text":"?"}}'
    part.path.write_bytes(gzip.compress(b"\n".join([newer, *lines, b""])))
    assert sum(entry.status is not None for entry in stored.read(folder)) == 3
    (folder / "000002-0.jsonl.gz").symlink_to("nowhere")
    (folder / "000003-0.jsonl.gz").mkdir()
    assert stored.parts(folder) == [part]


def said(before: Status | None, after: Status) -> list[tuple[str, str | None, str]]:
    return [(event.kind, event.who, event.text) for event in between(before, after, 9.0)]


def test_a_refused_worker_and_a_cause_that_is_new_are_events() -> None:
    cause = Cause("tool search", "tool search fails in 8 of its newest 8 calls", "bad")
    first = status(uptime_s=10.0, workers=[worker("a"), worker("b")])
    second = status(uptime_s=20.0, workers=[worker("a", does="refused", reason="the tokenizer differs"), worker("b")])
    third = msgspec.structs.replace(second, diagnosis=[cause])
    later = msgspec.structs.replace(cause, text="tool search fails in 9 of its newest 9 calls", since_s=1.0)
    assert said(first, second) == [("worker", "a", "worker a was refused: the tokenizer differs")]
    assert ("worker", "a", "worker a was refused: the tokenizer differs") in said(None, second)
    assert said(second, third) == [("notice", None, cause.text)]
    assert said(third, msgspec.structs.replace(third, diagnosis=[later])) == []
    assert time_row(5.0, second)["workers"] == 1


def test_what_happened_between_two_looks_is_said_once() -> None:
    first = status(
        uptime_s=10.0,
        step=4,
        servers=[server("v0", ServerState.SERVING), server("v1", ServerState.SERVING)],
        workers=[worker("a"), worker("b"), worker("c", does="silent"), worker("d")],
        learner=LearnerStatus(session=1),
        notices=[Notice(1, "tool", "old", "a", 1.0)],
    )
    assert said(first, first) == []
    second = status(
        uptime_s=20.0,
        step=5,
        checkpoint_step=5,
        servers=[server("v0", ServerState.QUARANTINED, "its proof failed"), server("v2", ServerState.JOINING)],
        workers=[worker("a", failures={"judge": 1}), worker("b", does="left"), worker("c"), worker("e")],
        learner=LearnerStatus(session=2, changed=["learner.learning_rate = 0.1 (was 0.2)"]),
        notices=[Notice(1, "tool", "old", "a", 1.0), Notice(2, "tool", "new", "e", 1.0)],
        stall=Stall(True, 120.0, "nobody samples"),
        evaluations=[Evaluation(5, 5, 1, ended="complete", reward=0.5, rows=4, done=4)],
        gave_up="nothing is accepted",
        finished=True,
    )
    assert said(first, second) == [
        ("learner", "learner", "the learner began session 2 at step 5"),
        ("change", "learner", "learner.learning_rate = 0.1 (was 0.2), from step 6 on"),
        ("learner", "learner", "a checkpoint of step 5 was saved"),
        ("run", None, "no step for 120 s: nobody samples"),
        ("run", None, "the run was given up: nothing is accepted"),
        ("run", None, "the run finished at step 5"),
        ("server", "v0", "server v0 went from serving to quarantined: its proof failed"),
        ("server", "v2", "server v2 at http://v2 joined, joining"),
        ("server", "v1", "server v1 left"),
        ("worker", "b", "worker b left"),
        ("worker", "c", "worker c came back"),
        ("worker", "e", "worker e joined from h"),
        ("worker", "a", "worker a: the first episodes that failed, for judge"),
        ("worker", "d", "worker d is no longer listed: it was not heard from for long"),
        ("notice", "e", "new"),
        ("evaluation", None, "evaluation of step 5: reward 0.500 (4 rows, 0.0 s)"),
    ]
    assert said(second, msgspec.structs.replace(second, uptime_s=30.0)) == []


def test_a_queue_that_started_again_says_so_and_what_it_tells_anew() -> None:
    before = status(uptime_s=100.0, step=9, notices=[Notice(7, "tool", "old", None, 1.0)])
    after = status(uptime_s=1.0, step=8, notices=[Notice(1, "tool", "new", None, 1.0)])
    assert said(before, after) == [
        ("run", None, "the queue started"),
        ("run", None, "the run went back from step 9 to 8"),
        ("notice", None, "new"),
    ]
    assert said(None, status())[0] == ("run", None, "the queue started")


def test_a_worker_that_falls_quiet_is_named_once_and_so_is_its_return() -> None:
    heard, quiet, silent = (
        status(workers=[worker("a", seen_s_ago=ago, does=does)])
        for ago, does in ((3.0, "generating"), (26.0, "quiet"), (70.0, "silent"))
    )
    text = "worker a is not heard from for 26 s: it was killed, hangs, or cannot reach the queue"
    assert said(heard, quiet) == [("worker", "a", text)]
    assert said(quiet, quiet) == said(quiet, silent) == []
    assert said(quiet, heard) == said(silent, heard) == [("worker", "a", "worker a came back")]
    assert [text for _, _, text in said(heard, silent)] == [text.replace("26 s", "a minute")]


def test_a_worker_that_was_started_again_at_once_is_an_event() -> None:
    before, after = (status(workers=[worker("a", pid=pid)]) for pid in (11, 12))
    text = "worker a was started again: its process 11 had ended without a word"
    assert said(before, after) == [("worker", "a", text)]
    assert said(status(workers=[worker("a", pid=0)]), after) == said(after, after) == []


def test_a_server_that_dies_is_one_event_however_many_workers_fail_by_it() -> None:
    names = [f"w{number}" for number in range(9)]
    before = status(uptime_s=9.0, servers=[server("v0", ServerState.SERVING)], workers=[*map(worker, names)])
    why = "http://v0: it takes no connection (Connection refused)"
    after = status(
        uptime_s=10.0,
        servers=[server("v0", ServerState.DOWN, why)],
        workers=[worker(name, failures={"server": 1}) for name in names],
        notices=[Notice(1, "server", f"vLLM server v0 at http://v0 is down: {why}", None, 0.0)],
    )
    assert said(before, after) == [
        ("server", "v0", f"server v0 went from serving to down: {why}"),
        ("worker", None, "worker w0 and 8 others: the first episodes that failed, for server"),
    ]


def test_a_history_of_a_clock_that_was_set_back_is_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    for began, steps in ((90_000.0, (1, 2)), (50_000.0, (3, 4))):
        kept = History(folder, 10**9)
        for step in steps:
            learner = LearnerStatus(1, step, step, metrics={"reward": 0.5})
            kept.add(status(step=step, learner=learner), began + 10.0 * step)
        kept.close()
    entries = list(stored.read(folder))
    assert [entry.status.step for entry in entries if entry.status is not None] == [1, 2, 3, 4]
    times = [entry.at for entry in entries]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (90_010.0, 90_030.0)
    assert all(entry.event is None or entry.event.at == entry.at for entry in entries)
    again = History(folder, 10**9)
    again.load()
    assert again.columns.steps.json()["step"] == [1, 2, 3, 4]
    assert again.columns.time.json()["at"] == sorted(again.columns.time.json()["at"])
    assert again.newest_at == 90_030.0
