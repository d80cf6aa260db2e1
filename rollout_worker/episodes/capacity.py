"""Counts a worker's slots: bounds the episodes that generate at once and those that are open, and measures idle slots.

An episode holds a slot only while a turn is sampled. While it waits for a tool, a reset or a judge, others use the
slot. Turns of episodes that have begun come before first turns, and both come before new tickets.

Episodes are open beyond the slots only to keep the slots busy, since a group that is opened too early grows old. A
worker begins with as many open episodes as it has slots. It opens one more group when a turn ends and a group's slots
are idle because other episodes wait for something. It opens one episode fewer for each turn that waits for a slot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

# The first turns of a larger group begin in parts of at least this many: waiting for more slots at once would leave the
# free ones idle.
_PART = 16

Activity = Literal["tools", "judgement"]

PER_ROUND = 16


class Reservation:
    """Slots for the first turns of a group's episodes. Each slot is given back once, however the group ends."""

    def __init__(self, capacity: Capacity, count: int) -> None:
        self._capacity = capacity
        self._granted = asyncio.Event()
        self._ready = 0  # granted slots that no first turn uses yet
        self._turns = 0  # first turns that hold a slot
        self.wanted = count  # first turns that still need a slot

    async def parts(self) -> AsyncIterator[int]:
        """Yield how many more first turns may begin, until all may."""
        while self.wanted or self._ready:
            self._granted.clear()
            if not self._ready:
                await self._granted.wait()
            count, self._ready = self._ready, 0
            self._turns += count
            if count:
                yield count

    def give(self) -> None:
        """Give back the slot of a first turn that is done."""
        if self._turns:
            self._turns -= 1
            self._capacity.turn_done()

    def give_all(self) -> None:
        """Give back all slots: at the end of the group, or before its episodes wait for something else and then take
        slots as they need them."""
        held, self.wanted = self._ready + self._turns, 0
        self._ready = self._turns = 0
        self._granted.set()
        self._capacity.give(held)

    def grant(self, slots: int) -> None:
        self.wanted -= slots
        self._ready += slots
        self._granted.set()


class _Turn(asyncio.Future[None]):
    """One turn that waits for a slot."""

    @property
    def wanted(self) -> int:
        return int(not self.done())

    def grant(self, slots: int) -> None:
        self.set_result(None)


class Capacity:
    """Slots for the episodes that generate, and room for those that are open.

    Args:
        total: Number of slots.
        max_open: Maximum number of open episodes.
        clock: Seconds, monotonic.

    Attributes:
        open: Episodes of all running tickets.
        cautious: Open no more episodes than there are slots, because groups have not succeeded yet, or fail now.
    """

    def __init__(self, total: int, max_open: int, clock: Callable[[], float]) -> None:
        self.total = total
        self.max_open = max(total, max_open)
        self.free = total
        self.open = 0
        self.cautious = True
        self._clock = clock
        self._changed = asyncio.Event()
        self.enough_open = total
        # Turns of episodes that have begun, and first turns, that wait for a slot.
        self._begun: deque[_Turn] = deque()
        self._new: deque[_Turn | Reservation] = deque()
        self._at: dict[Activity, int] = {"tools": 0, "judgement": 0}
        self._asking = False
        self._next_size = 0  # Episodes of the group that waits for room; 0 if none waits.
        self._idle_s = self._full_s = 0.0
        self._noted_at = clock()

    @property
    def generating(self) -> int:
        """Number of slots that are held, or reserved for a group that is about to begin."""
        return self.total - self.free

    @property
    def waiting(self) -> int:
        """Number of episodes that wait for a slot."""
        return sum(waiting.wanted for line in (self._begun, self._new) for waiting in line)

    @property
    def waited_s(self) -> float:
        """Seconds that the worker asked for tickets, weighted by the share of free slots."""
        self._note()
        return self._idle_s

    @property
    def full_s(self) -> float:
        """Seconds that the worker asked for no tickets because enough episodes were open, weighted by the share of free
        slots."""
        self._note()
        return self._full_s

    def metrics(self) -> dict[str, float]:
        """Return where the episodes are now and how long slots were idle, as fields of `WorkerReport`."""
        return {
            "episodes_in_flight": self.open,
            "episodes_generating": self.generating,
            "episodes_waiting": self.waiting,
            **{f"episodes_in_{activity}": count for activity, count in self._at.items()},
            "waited_s": self.waited_s,
            "full_s": self.full_s,
        }

    def room(self, group_size: int) -> int:
        """Return how many groups of this size may begin now. A group larger than the maximum begins when no other is
        open."""
        if not self._slots_for(group_size):
            return 0
        most = self.total if self.cautious else self.enough_open
        return min(max(1, self.free // group_size), max(0, most - self.open) // group_size) or int(self.open == 0)

    async def wait_for_room(self, group_size: int) -> int:
        """Wait until a group of this size may begin; return how many may."""
        try:
            while not (room := self.room(group_size)):
                self._note()
                self._next_size = group_size
                self._changed.clear()
                await self._changed.wait()
            return room
        finally:
            self._note()
            self._next_size = 0

    def begin(self, episodes: int) -> Reservation:
        """Open a ticket's episodes, and reserve slots for their first turns."""
        self._note()
        self.open += episodes
        reservation = Reservation(self, episodes)
        self._new.append(reservation)
        self._serve()
        return reservation

    def end(self, episodes: int, reservation: Reservation) -> None:
        self.open -= episodes
        reservation.give_all()

    @asynccontextmanager
    async def turn(self, begun: bool = True) -> AsyncIterator[float]:
        """Hold a slot for one turn; yields the seconds that the turn waited for it. `begun`: whether the episode has
        sampled a turn before."""
        waited_s = await self._slot(begun)
        try:
            yield waited_s
        finally:
            self.turn_done()

    @contextmanager
    def being(self, activity: Activity, episodes: int = 1) -> Iterator[None]:
        """Count episodes as being at `place`."""
        self._at[activity] += episodes
        try:
            yield
        finally:
            self._at[activity] -= episodes

    def turn_done(self) -> None:
        """Give back the slot of a turn. If only the number of open episodes keeps the next group out, raise that
        number."""
        self.give(1)
        if self._is_full() and not self.cautious:
            self.enough_open = min(self.max_open, self.open + self._next_size)

    def give(self, slots: int) -> None:
        self._note()
        self.free += slots
        self._serve()
        self._changed.set()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count free slots as idle while the worker asks for tickets."""
        self._note()
        self._asking = True
        try:
            yield
        finally:
            self._note()
            self._asking = False

    async def _slot(self, begun: bool) -> float:
        self._note()
        if self.free > 0 and (begun or self._served_first() is None):
            self.free -= 1
            return 0.0
        self.enough_open = max(self.total, self.enough_open - 1)
        since = self._clock()
        waiting = _Turn()
        (self._begun if begun else self._new).append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.give(1)
            raise
        return self._clock() - since

    def _serve(self) -> None:
        """Hand free slots to the turns and groups that wait, in order."""
        while (waiting := self._served_first()) is not None and self.free >= self._least(waiting.wanted):
            slots = min(self.free, waiting.wanted)
            self.free -= slots
            waiting.grant(slots)

    def _served_first(self) -> _Turn | Reservation | None:
        """Return the turns or the group that get the next slots. Forget those that no longer want any."""
        for line in (self._begun, self._new):
            while line and not line[0].wanted:
                line.popleft()
            if line:
                return line[0]
        return None

    def _is_full(self) -> bool:
        """Return whether only the number of open episodes keeps the next group from beginning."""
        return self._next_size > 0 and self._slots_for(self._next_size) and not self.room(self._next_size)

    def _slots_for(self, group_size: int) -> bool:
        return self._served_first() is None and self.free >= self._least(group_size)

    def _least(self, wanted: int) -> int:
        return min(wanted, _PART, self.total)

    def _note(self) -> None:
        now = self._clock()
        idle_s = (now - self._noted_at) * self.free / self.total
        if self._asking:
            self._idle_s += idle_s
        elif self._is_full():
            self._full_s += idle_s
        self._noted_at = now


class LoopYield:
    """Lets a few tasks through in each round of the event loop, first come first served.

    The loop runs all tasks that are ready before it looks at anything else. If a thousand answers came at once, reading
    them would hold up heartbeats and tickets.
    """

    def __init__(self, per_round: int = PER_ROUND) -> None:
        self._per_round = per_round
        self._left = per_round
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def passed(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _turn(self) -> None:
        """Begin a new round. Repeats until a round in which no task passes."""
        busy = self._left < self._per_round
        self._left = self._per_round
        while self._waiting and self._left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # A cancelled task is done.
                waiting.set_result(None)
                self._left -= 1
        self._turning = busy or self._left < self._per_round
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
