"""Watches the ranks: one that gives no sign of life is named, and the run ends instead of waiting for it.

Every rank beats at the store; rank 0 hears the others, and the others hear rank 0. Rank 0 reports a silent rank, and
takes it to be lost after `learner.rank_timeout_s`. Its main thread's wait ends when the connection to that rank breaks,
so a rank on this machine is killed. Where nothing ends the wait, the process ends itself. The other ranks end when rank
0 is silent for as long.

One thread speaks with the store and may hang: a call has no time-out once the store's server has stopped, as it does
with rank 0. So another thread watches the clock.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.learner.ranks.stopping import LearnerFailed, end_now

BEAT_EVERY_S = 2.0

# A store with thousands of ranks may take this long.
ANSWERS_WITHIN_S = 8.0

LOOK_EVERY_S = 0.5

# In place of learner.rank_timeout_s until a rank has the run file.
RANK_TIMEOUT_S = 120.0

# Time for all ranks to load their libraries and come.
COME_WITHIN_S = 600.0

TOLD_AFTER_S = 30.0

# After a signal: beats come every two seconds, and a checkpoint takes some of the grace time.
SIGNAL_GRACE_S = 10.0

NOTICED_WITHIN_S = 3.0

# Rank 0 may hang in a collective with a rank that is gone: gloo reports it at once, NCCL does not.
GIVES_UP_AFTER_S = 60.0

# Exit code of rank 0 that has lost another rank: all may be started again.
RANK_LOST = 75

logger = logging.getLogger(__name__)


class RankLost(LearnerFailed):
    """A rank is gone, and with it the step."""


@dataclass(frozen=True)
class Silence:
    """The silence of one rank.

    Attributes:
        rank: The rank; None if the store itself does not answer.
        seconds: Since its last sign of life, or since the start.
        who: The rank's process and machine; empty if it has not come yet.
    """

    rank: int | None
    seconds: float
    who: str = ""


class Signs:
    """Remembers when the last sign of life of each rank came. Pure: `now` is given, in seconds since the start."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._answered = 0.0
        self._beats = dict.fromkeys(ranks, 0)
        self._since = dict.fromkeys(self._beats, 0.0)
        self.who: dict[int, str] = {}

    @property
    def ranks(self) -> list[int]:
        return list(self._beats)

    def hear(self, beats: Mapping[int, int], now: float) -> None:
        """Take the number of each rank's beats, as the store has it."""
        self._answered = now
        for rank, beat in beats.items():
            if beat != self._beats[rank]:
                self._beats[rank], self._since[rank] = beat, now

    def silent(self, now: float) -> list[Silence]:
        """Return the silence of each rank, or of the store where that does not answer: then no rank is known."""
        if now - self._answered > ANSWERS_WITHIN_S:
            return [Silence(None, now - self._answered)]
        return [Silence(rank, now - since, self.who.get(rank, "")) for rank, since in self._since.items()]


def lost(silences: Sequence[Silence], timeout_s: float, signalled: bool) -> list[Silence]:
    """Return the silences that are not waited for any longer.

    Args:
        signalled: Whether the run is to end, so that there is little time.
    """
    found = []
    for silence in silences:
        limit_s = timeout_s
        if silence.rank is not None and not silence.who:  # it has not come yet
            limit_s = max(timeout_s, COME_WITHIN_S)
        elif signalled:
            limit_s = min(timeout_s, SIGNAL_GRACE_S)
        if silence.seconds >= limit_s:
            found.append(silence)
    return found


def quiet(silences: Sequence[Silence], timeout_s: float) -> list[Silence]:
    """Return the silences that are worth a word."""
    after_s = min(TOLD_AFTER_S, timeout_s / 2)
    return [silence for silence in silences if silence.seconds >= after_s and (silence.who or silence.rank is None)]


def named(silence: Silence) -> str:
    """Name a silent rank, or the store."""
    if silence.rank is None:
        return "the store through which ranks speak"
    return f"rank {silence.rank} of the learner" + (f" ({silence.who})" if silence.who else "")


def _why(gone: Sequence[Silence], timeout_s: float) -> str:
    names, longest = ", ".join(named(silence) for silence in gone), gone[0]
    if longest.rank is not None and not longest.who:
        return f"{names} did not come within {longest.seconds:.0f} s: see its log and its machine"
    silent = f"gave no sign of life for {longest.seconds:.0f} s"
    return f"{names} {silent} (learner.rank_timeout_s = {timeout_s:g}): see its log and its machine"


class Pulse:
    """Beats for this rank, and listens to the ranks of `hears`.

    Time in which this process itself did not run, as it was stopped, counts for nobody.

    Args:
        look: Called twice a second, on a thread, with their silence.
    """

    def __init__(self, store: Any, rank: int, hears: Iterable[int], look: Callable[[Sequence[Silence]], None]) -> None:
        self._store = store
        self._rank = rank
        self.look = look
        self._signs = Signs(hears)
        self._now = 0.0
        self._ended = threading.Event()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name=f"ranks{work.__name__}", daemon=True).start()

    def end(self) -> None:
        """Stop both threads."""
        self._ended.set()

    def silent(self) -> list[Silence]:
        """Return the silence of the ranks that it hears, now."""
        return self._signs.silent(self._now)

    def _beat(self) -> None:
        try:
            self._store.set(f"who/{self._rank}", f"process {os.getpid()} on {socket.gethostname()}")
            while True:
                self._store.add(f"beat/{self._rank}", 1)
                beats = {rank: self._store.add(f"beat/{rank}", 0) for rank in self._signs.ranks}
                for rank, beat in beats.items():
                    if beat and rank not in self._signs.who:
                        self._signs.who[rank] = self._store.get(f"who/{rank}").decode()
                self._signs.hear(beats, self._now)
                if self._ended.wait(BEAT_EVERY_S):
                    return
        except RuntimeError:  # the store is gone, and will not answer again
            return

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(LOOK_EVERY_S):
            now = time.monotonic()
            self._now += min(now - looked, 2 * LOOK_EVERY_S)
            looked = now
            self.look(self._signs.silent(self._now))


class Alarm:
    """Notices, on one rank, ranks that are gone. Its methods may be called on any thread.

    Attributes:
        timeout_s: `learner.rank_timeout_s`.
        say: Shows a line.
        on_silent: Called with the name of a silent rank, and with None once all are heard again.
        kill: Ends a rank that is a child of this process.
        kill_all: Ends all of them.
        signalled: Says whether the run is to end.
    """

    def __init__(self, rank: int, count: int, store: Any, timeout_s: float = RANK_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.say: Callable[[str], None] = logger.warning
        self.on_silent: Callable[[str | None], None] = lambda who: None
        self.kill: Callable[[int], None] = lambda rank: None
        self.kill_all: Callable[[], None] = lambda: None
        self.signalled: Callable[[], bool] = lambda: False
        self._on_lost: Callable[[RankLost], None] = lambda error: None
        self._rank = rank
        self._why: str | None = None
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self._free = threading.Event()
        self._told: set[int | None] = set()
        hears = range(1, count) if rank == 0 else [0]
        self.pulse = Pulse(store, rank, hears, self.look if rank == 0 else self.look_at_rank_0)

    @property
    def why(self) -> str | None:
        """Describes the rank that is gone; None while all are there."""
        return self._why

    @property
    def on_lost(self) -> Callable[[RankLost], None]:
        """Called with what is known of the first rank that is gone, even if it went before this was set."""
        return self._on_lost

    @on_lost.setter
    def on_lost(self, heard: Callable[[RankLost], None]) -> None:
        with self._lock:
            self._on_lost = heard
        if self._why is not None:
            heard(RankLost(self._why))

    def waits(self) -> None:
        """Note that the main thread may now be in a collective, which a rank that is gone does not end by itself."""
        self._free.clear()

    def is_free(self) -> None:
        """Note that the main thread is in no collective."""
        self._free.set()

    def end(self) -> None:
        """Stop watching."""
        self.pulse.end()
        self._free.set()

    def lost(self, why: str) -> None:
        """Report a rank that is gone. Only the first counts: others follow it."""
        with self._lock:
            if self._why is not None:
                return
            self._why, heard = why, self._on_lost
        self._gone.set()
        heard(RankLost(why))
        threading.Thread(target=self.give_up, name="ranks-lost", daemon=True).start()

    def cause(self) -> str | None:
        """Return the cause of a broken connection: the end of a process may be noticed after that."""
        self._gone.wait(NOTICED_WITHIN_S)
        return self._why

    def last(self) -> str | None:
        """End ranks on this machine, right before this process ends. Returns which rank the main thread may be waiting
        for."""
        seen = [of for of in self.pulse.silent() if of.seconds >= SIGNAL_GRACE_S / 2]
        names = [f"{named(of)}, {'silent for' if of.who else 'unheard for'} {of.seconds:.0f} s" for of in seen]
        self.kill_all()
        return self._why or ", ".join(names) or None

    def look(self, silences: Sequence[Silence]) -> None:
        """Report the ranks that are gone, and those that are silent or heard again."""
        if self._why is not None:
            return
        gone = lost(silences, self.timeout_s, self.signalled())
        if gone:
            self.lost(_why(gone, self.timeout_s))
            for silence in gone:
                if silence.rank is not None:
                    self.kill(silence.rank)
            return
        found = {silence.rank: silence for silence in quiet(silences, self.timeout_s)}
        new = [silence for rank, silence in found.items() if rank not in self._told]
        back = self._told - found.keys()
        self._told = set(found)
        if new or back:
            threading.Thread(target=self._tell, args=(new, back, list(found.values())), daemon=True).start()

    def _tell(self, new: list[Silence], back: set[int | None], found: list[Silence]) -> None:
        """Report on its own thread: a terminal may be held, and the queue slow."""
        for silence in new:
            self.say(
                f"{named(silence)} gives no sign of life for {silence.seconds:.0f} s: the run ends after "
                f"learner.rank_timeout_s = {self.timeout_s:g}"
            )
        for rank in back:
            self.say(f"{named(Silence(rank, 0.0))} is heard again")
        self.on_silent(", ".join(named(silence) for silence in found) or None)

    def look_at_rank_0(self, silences: Sequence[Silence]) -> None:
        """End this process once rank 0 is gone."""
        for silence in lost(silences, self.timeout_s, signalled=False):
            end_now(
                1,
                f"learner: rank {self._rank}: {named(silence)} gave no sign of life for {silence.seconds:.0f} s "
                f"(learner.rank_timeout_s = {self.timeout_s:g}): this rank ends",
            )

    def give_up(self) -> None:
        """End this process unless its main thread leaves the collective in time."""
        if not self._free.wait(GIVES_UP_AFTER_S):
            self.kill_all()
            end_now(RANK_LOST, f"learner: {self._why}; rank 0 waits for it in vain and ends")
