"""Signs of life: every rank beats at the store; rank 0 hears the others, and the others hear rank 0.

One thread speaks with the store and may hang in that: a call to it has no time-out once its server has stopped, as it
does with rank 0. So another thread watches the clock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEAT_EVERY_S = 2.0
# For a store that tells of thousands of ranks.
ANSWERS_WITHIN_S = 8.0
LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Silence:
    """rank: None where the store itself does not answer; seconds: since its last sign of life, or since the start;
    who: its process and machine, empty where it has not come yet."""

    rank: int | None
    seconds: float
    who: str = ""


class Signs:
    """When a sign of life of each rank came last. Pure: `now` is given, in seconds."""

    def __init__(self, ranks: Iterable[int], now: float = 0.0) -> None:
        self._answered = now
        self._beats = dict.fromkeys(ranks, 0)
        self._since = dict.fromkeys(self._beats, now)
        self.who: dict[int, str] = {}

    @property
    def ranks(self) -> list[int]:
        return list(self._beats)

    def hear(self, beats: Mapping[int, int], now: float) -> None:
        """The store has told how often each rank has beaten."""
        self._answered = now
        for rank, beat in beats.items():
            if beat != self._beats[rank]:
                self._beats[rank], self._since[rank] = beat, now

    def silent(self, now: float) -> list[Silence]:
        """The silence of each rank, or of the store where that does not answer: then nothing is known of the ranks."""
        if now - self._answered > ANSWERS_WITHIN_S:
            return [Silence(None, now - self._answered)]
        return [Silence(rank, now - since, self.who.get(rank, "")) for rank, since in self._since.items()]


class Pulse:
    """This rank's beat, and its ear for `hears`. look: called twice a second, on a thread, with their silence.

    Time in which this process did not run, as it was stopped itself, counts for nobody.
    """

    def __init__(self, store: Any, rank: int, hears: Iterable[int], look: Callable[[Sequence[Silence]], None]) -> None:
        self._store = store
        self._rank = rank
        self._look = look
        self._signs = Signs(hears)
        self._now = 0.0
        self._ended = threading.Event()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name=f"ranks{work.__name__}", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def silent(self) -> list[Silence]:
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
        except RuntimeError:  # the store has gone: from here on it does not answer
            return

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(LOOK_EVERY_S):
            now = time.monotonic()
            self._now += min(now - looked, 2 * LOOK_EVERY_S)
            looked = now
            self._look(self._signs.silent(self._now))
