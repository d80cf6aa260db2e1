"""The snapshots that are alive: at most three, so that a slow server costs memory for one more and not for all.

One or more are on their way to servers, the newest waits for servers that come, one is being filled. The learner's
thread fills, the loop's thread takes and gives back. Where a third would be held by a server that is behind, the
newest, which no server has taken, is overtaken instead: it is filled anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import torch

from weight_sync.proof.probe import Probe
from weight_sync.snapshot import Snapshot

logger = logging.getLogger(__name__)

MOST_ALIVE = 3
# How long a full house is waited for before the server that holds the oldest version has to let go of it, and after.
HELD_S = 0.5
LET_GO_S = 5.0


class Snapshots:
    """`waited_s`: seconds that the learner's thread has waited for a buffer, in all; `let_go`: is called
    with the names of servers that hold the oldest version, which must give it back soon; `waits`: with what the learner
    waits for, then None. Both are called on the learner's thread."""

    def __init__(
        self,
        let_go: Callable[[list[str]], None] = lambda names: None,
        waits: Callable[[str | None], None] = lambda what: None,
    ) -> None:
        self._let_go = let_go
        self.waited_s = 0.0
        self._waits = waits
        self._changed = threading.Condition()
        self._newest: Snapshot | None = None
        self._holders: dict[int, set[str]] = {}
        self._held: dict[int, Snapshot] = {}
        self._free: list[torch.Tensor] = []
        # Versions whose buffer a thread may still read, after a transfer that was cut off.
        self._read: set[int] = set()

    @property
    def newest(self) -> Snapshot | None:
        return self._newest

    @property
    def alive(self) -> int:
        """Snapshots that have a buffer now, the one being filled not among them."""
        with self._changed:
            return self._alive()

    def fill(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe, dtype: torch.dtype | None
    ) -> Snapshot:
        """Copy the weights; the result is the newest from now on. Waits at most `HELD_S` + `LET_GO_S` for a buffer."""
        snapshot = Snapshot(version, weights, probe, dtype, self._buffer())
        with self._changed:
            before, self._newest = self._newest, snapshot
            if before is not None and before.version not in self._held:
                self._keep(before)
        return snapshot

    def take(self, name: str) -> Snapshot | None:
        """The newest, held by server `name` until it is given back."""
        with self._changed:
            snapshot = self._newest
            if snapshot is not None:
                self._held[snapshot.version] = snapshot
                self._holders.setdefault(snapshot.version, set()).add(name)
            return snapshot

    def give_back(self, name: str, snapshot: Snapshot, whole: bool) -> None:
        """`whole`: the publication came to its end, so that no thread can still read the buffer: it is used again."""
        with self._changed:
            names = self._holders.get(snapshot.version)
            if names is None or name not in names:
                return
            names.discard(name)
            if not whole:
                self._read.add(snapshot.version)
            if not names:
                del self._holders[snapshot.version], self._held[snapshot.version]
                if snapshot is not self._newest:
                    self._keep(snapshot)
            self._changed.notify_all()

    def held(self) -> dict[int, list[str]]:
        """The servers that a version is on its way to, by version."""
        with self._changed:
            return self._named()

    def _buffer(self) -> torch.Tensor | None:
        """One to copy into, None for a new one."""
        with self._changed:
            if self._alive() >= MOST_ALIVE and not self._overtake():
                self._wait_for_room()
            return self._free.pop() if self._free else None

    def _wait_for_room(self) -> None:
        oldest = min(self._held)
        names = self._named()[oldest]
        began = time.monotonic()
        what = f"{', '.join(names)}, to which version {oldest} is still on its way"
        logger.warning("the next snapshot waits for %s", what)
        self._waits(what)
        try:
            if self._room_within(HELD_S):
                return
            self._let_go(names)
            if not self._room_within(LET_GO_S):
                logger.error("%s did not let go of version %d within %g s: it is forgotten", what, oldest, LET_GO_S)
                self._holders.pop(oldest, None)
                self._held.pop(oldest, None)
        finally:
            self.waited_s += time.monotonic() - began
            self._waits(None)

    def _room_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._alive() >= MOST_ALIVE and not self._overtake():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(left)
        return True

    def _overtake(self) -> bool:
        """Take the newest away, if no server has it: what is filled next replaces it."""
        if self._newest is None or self._newest.version in self._held:
            return False
        self._keep(self._newest)
        self._newest = None
        return True

    def _alive(self) -> int:
        waiting = self._newest is not None and self._newest.version not in self._held
        return len(self._held) + waiting + 1

    def _named(self) -> dict[int, list[str]]:
        return {version: sorted(names) for version, names in sorted(self._holders.items())}

    def _keep(self, snapshot: Snapshot) -> None:
        """Its buffer is to be filled again, unless it may still be read."""
        if snapshot.version in self._read:
            self._read.discard(snapshot.version)
        elif len(self._free) < MOST_ALIVE - 1:
            self._free.append(snapshot.flat)
