"""Which silence is waited out, told, or taken for a death; and what follows from it. No process, no store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from slipstream.learner.ranks import liveness as alarms
from slipstream.learner.ranks.liveness import ANSWERS_WITHIN_S, BEAT_EVERY_S, Alarm, Pulse, Signs, Silence, lost, quiet

WHO = "process 7 on a"
WITHIN_S = 10.0


@pytest.mark.parametrize(
    ("silence", "signalled", "told", "gone"),
    [
        (Silence(1, 9.0, WHO), False, False, False),
        (Silence(1, 30.0, WHO), False, True, False),
        (Silence(1, 120.0, WHO), False, True, True),
        (Silence(1, 9.0, WHO), True, False, False),
        (Silence(1, 10.0, WHO), True, False, True),
        # One that has not come loads its libraries: for ten minutes, whatever came meanwhile.
        (Silence(1, 500.0), True, False, False),
        (Silence(1, 600.0), False, False, True),
        (Silence(None, 119.0), False, True, False),
        (Silence(None, 120.0), False, True, True),
    ],
)
def test_how_long_a_silence_is_waited_out(silence: Silence, signalled: bool, told: bool, gone: bool) -> None:
    assert bool(quiet([silence], 120.0)) == told
    assert bool(lost([silence], 120.0, signalled)) == gone


def test_a_rank_is_silent_since_its_last_beat() -> None:
    signs = Signs([1, 2])
    signs.who[1] = WHO
    signs.hear({1: 1, 2: 0}, 10.0)
    signs.hear({1: 2, 2: 0}, 12.0)
    signs.hear({1: 2, 2: 0}, 15.0)
    assert signs.silent(16.0) == [Silence(1, 4.0, WHO), Silence(2, 16.0)]


def test_of_a_store_that_does_not_answer_no_rank_is_blamed() -> None:
    signs = Signs([1])
    signs.hear({1: 1}, 10.0)
    assert signs.silent(10.0 + ANSWERS_WITHIN_S)[0].rank == 1
    assert signs.silent(11.0 + ANSWERS_WITHIN_S) == [Silence(None, 1.0 + ANSWERS_WITHIN_S)]


class HangingStore:
    """As one whose server has stopped: a call does not return."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def set(self, name: str, value: str) -> None: ...

    def add(self, name: str, amount: int) -> int:
        self.released.wait()
        return 0


def test_a_store_whose_calls_do_not_return_is_noticed() -> None:
    store, seen, noticed = HangingStore(), [], threading.Event()

    def look(silences: Sequence[Silence]) -> None:
        seen.append(silences)
        noticed.set()

    pulse = Pulse(store, 1, [0], look)
    try:
        assert noticed.wait(WITHIN_S), "the clock is watched by another thread than the one that asks"
    finally:
        pulse.end()
        store.released.set()
    assert seen[0][0].rank == 0


class Heard:
    """A pulse that has heard this."""

    def __init__(self, *silences: Silence) -> None:
        self._silences = list(silences)

    def silent(self) -> list[Silence]:
        return self._silences

    def end(self) -> None: ...


class Scene:
    """Rank 0 of two, whose store never tells anything: the test says how silent rank 1 is."""

    def __init__(self) -> None:
        self.store = HangingStore()
        self.alarm = Alarm(0, 2, self.store, 120.0)
        self.alarm.pulse.end()
        self.said: list[str] = []
        self.silent: list[str | None] = []
        self.killed: list[int] = []
        self.heard: list[str] = []
        self.told = threading.Event()
        self.alarm.say = self.said.append
        self.alarm.kill = self.killed.append
        self.alarm.on_silent = self._on_silent

    def _on_silent(self, who: str | None) -> None:
        self.silent.append(who)
        self.told.set()

    def look(self, seconds: float, tells: bool = False) -> None:
        self.told.clear()
        self.alarm.look([Silence(1, seconds, WHO)])
        if tells:
            assert self.told.wait(WITHIN_S)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.alarm.end()
    scene.store.released.set()


def test_a_silent_rank_is_named_once_and_called_back(scene: Scene) -> None:
    scene.look(29.0)
    scene.look(30.0, tells=True)
    scene.look(31.0)
    scene.look(0.0, tells=True)
    assert scene.silent == [f"rank 1 of the learner ({WHO})", None]
    assert len(scene.said) == 2
    assert f"rank 1 of the learner ({WHO}) gives no sign of life for 30 s" in scene.said[0]
    assert "learner.rank_timeout_s = 120" in scene.said[0]
    assert "heard again" in scene.said[1]


def test_a_rank_that_stays_silent_is_lost_and_killed_and_the_first_cause_stays(scene: Scene) -> None:
    scene.alarm.on_lost = lambda error: scene.heard.append(str(error))
    scene.look(120.0)
    scene.alarm.lost("rank 1 ended with signal SIGKILL")
    assert scene.killed == [1]
    assert len(scene.heard) == 1
    assert scene.alarm.cause() == scene.heard[0]
    assert "rank 1" in scene.heard[0]
    assert "no sign of life for 120 s (learner.rank_timeout_s = 120)" in scene.heard[0]


def test_after_a_signal_less_is_waited(scene: Scene) -> None:
    scene.look(10.0)
    assert scene.killed == []
    scene.alarm.signalled = lambda: True
    scene.look(10.0)
    assert scene.killed == [1]


def test_whoever_asks_late_hears_of_a_rank_that_has_gone(scene: Scene) -> None:
    scene.alarm.lost("rank 1 has gone")
    scene.alarm.on_lost = lambda error: scene.heard.append(str(error))
    assert scene.heard == ["rank 1 has gone"]


@pytest.mark.parametrize(
    ("silences", "named"),
    [
        ([Silence(1, 2.0, WHO)], None),
        ([Silence(1, 2.0, WHO), Silence(2, 12.0, WHO)], f"rank 2 of the learner ({WHO}), silent for 12 s"),
        ([Silence(1, 16.0)], "rank 1 of the learner, unheard for 16 s"),
    ],
)
def test_what_a_process_that_ends_itself_waited_for(silences: list[Silence], named: str | None, scene: Scene) -> None:
    """And those of its ranks that are stopped do not outlive it."""
    ended: list[bool] = []
    scene.alarm.kill_all = lambda: ended.append(True)
    scene.alarm.pulse = Heard(*silences)  # type: ignore[assignment]
    assert scene.alarm.last() == named
    assert ended == [True]


@pytest.mark.parametrize("free", [False, True])
def test_a_main_thread_that_nothing_frees_ends_with_the_process(
    scene: Scene, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL does not tell of a rank that has gone. A main thread that is out of it may be writing a checkpoint."""
    ended: list[Any] = []
    monkeypatch.setattr(alarms, "GIVES_UP_AFTER_S", 0.0)
    monkeypatch.setattr(alarms, "end_now", lambda code, text: ended.append((code, text)))
    if free:
        scene.alarm.is_free()
    scene.alarm._why = "rank 1 has gone"
    scene.alarm.give_up()
    assert ended == (
        [] if free else [(alarms.RANK_LOST, "learner: rank 1 has gone; rank 0 waits for it in vain and ends")]
    )


@pytest.mark.parametrize(("rank", "seconds", "ends"), [(0, 119.0, False), (0, 120.0, True), (None, 120.0, True)])
def test_a_follower_ends_when_rank_0_or_the_store_is_silent(
    rank: int | None, seconds: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(alarms, "end_now", lambda code, text: ended.append((code, text)))
    store = HangingStore()
    follower = Alarm(1, 2, store, 120.0)
    follower.end()
    follower.look_at_rank_0([Silence(rank, seconds, "" if rank is None else WHO)])
    store.released.set()
    assert bool(ended) == ends
    for code, text in ended:
        assert code == 1
        assert "rank 1: " in text
        assert "for 120 s (learner.rank_timeout_s = 120)" in text


def test_a_beat_comes_often_enough_to_be_missed_after_a_signal() -> None:
    assert 3 * BEAT_EVERY_S <= alarms.SIGNAL_GRACE_S
