"""How many episodes a worker lets generate, how many it has open, and how much of that was idle.

A slot is held while a turn is sampled, and at no other time: an episode that waits for a tool, a reset or a judge
leaves its slot to others. Turns of episodes that have begun come before first turns, and both before new tickets.

What is open beyond the slots is to keep them busy, and no more: each group that is open too early only grows old. So a
worker begins with as many episodes as it has slots. It opens one more group when a turn ends and leaves a group's
slots idle, as the others wait for something; and one episode fewer for each turn that has to wait for its slot.

Lets a few tasks through in each round of the event loop.

The loop runs all that became ready before it looks at anything else: a thousand episodes whose answers come at once
would hold up heartbeats and tickets for as long as a thousand turns take to be read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

# First turns of a larger group begin in parts of at least so many: waiting for more at once would idle those that are
# free by then.
_PART = 16

Place = Literal["tools", "judgement"]


class Reservation:
    """Slots for the first turns of a group's episodes. Each is given back once, however the group ends."""

    def __init__(self, capacity: Capacity, count: int) -> None:
        self._capacity = capacity
        self._granted = asyncio.Event()
        self._ready = 0  # slots that no first turn has yet
        self._turns = 0  # first turns that have theirs
        self.wanted = count  # first turns whose slot is still to come

    async def parts(self) -> AsyncIterator[int]:
        """How many first turns may begin now, again and again until all may."""
        while self.wanted or self._ready:
            self._granted.clear()
            if not self._ready:
                await self._granted.wait()
            count, self._ready = self._ready, 0
            self._turns += count
            if count:
                yield count

    def give(self) -> None:
        """An episode's first turn is done."""
        if self._turns:
            self._turns -= 1
            self._capacity.turn_done()

    def give_all(self) -> None:
        """Before the episodes wait for something else: they then take slots as they need them. Or at the end."""
        held, self.wanted = self._ready + self._turns, 0
        self._ready = self._turns = 0
        self._granted.set()
        self._capacity.give(held)

    def grant(self, slots: int) -> None:
        self.wanted -= slots
        self._ready += slots
        self._granted.set()


class _Turn(asyncio.Future[None]):
    """One turn that waits for its slot."""

    @property
    def wanted(self) -> int:
        return int(not self.done())

    def grant(self, slots: int) -> None:
        self.set_result(None)


class Capacity:
    """Slots for `total` episodes that generate, and room for `max_open` in all. `clock`: seconds, monotonic. `open`:
    episodes of all tickets at work. `cautious`: open no more than the slots hold, as nothing shows yet, or any longer,
    that what is opened succeeds."""

    def __init__(self, total: int, max_open: int, clock: Callable[[], float]) -> None:
        self.total = total
        self.max_open = max(total, max_open)
        self.free = total
        self.open = 0
        self.cautious = True
        self._clock = clock
        self._changed = asyncio.Event()
        self._enough_open = total
        # Turns of episodes that have begun, and first turns, that wait for a slot.
        self._begun: deque[_Turn] = deque()
        self._new: deque[_Turn | Reservation] = deque()
        self._at: dict[Place, int] = {"tools": 0, "judgement": 0}
        self._asking = False
        self._next_size = 0  # episodes of the group that there is to be room for, 0 while none is wanted
        self._idle_s = self._full_s = 0.0
        self._noted_at = clock()

    @property
    def generating(self) -> int:
        """Slots that are held, or reserved for a group that is about to begin."""
        return self.total - self.free

    @property
    def waiting(self) -> int:
        """Episodes that wait for a slot."""
        return sum(waiting.wanted for line in (self._begun, self._new) for waiting in line)

    @property
    def waited_s(self) -> float:
        """Seconds that the worker asked for tickets, each times the share of its slots that was free."""
        self._note()
        return self._idle_s

    @property
    def full_s(self) -> float:
        """Seconds that it asked for none as enough episodes were open, each times the share of slots that was free."""
        self._note()
        return self._full_s

    def figures(self) -> dict[str, float]:
        """Where the episodes are now, and what was idle: fields of `WorkerReport`."""
        return {
            "episodes_in_flight": self.open,
            "episodes_generating": self.generating,
            "episodes_waiting": self.waiting,
            **{f"episodes_in_{place}": count for place, count in self._at.items()},
            "waited_s": self.waited_s,
            "full_s": self.full_s,
        }

    def room(self, group_size: int) -> int:
        """Groups of so many episodes that may begin now; one of more than may be open begins when it is alone."""
        if not self._slots_for(group_size):
            return 0
        most = self.total if self.cautious else self._enough_open
        return min(max(1, self.free // group_size), max(0, most - self.open) // group_size) or int(self.open == 0)

    async def wait_for_room(self, group_size: int) -> int:
        """The room, once there is some."""
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
        """A ticket's episodes are open from now on, and get slots for their first turns."""
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
        """A slot for one turn, with the seconds that it waited for it; `begun`: of an episode that has sampled a turn
        before."""
        waited_s = await self._slot(begun)
        try:
            yield waited_s
        finally:
            self.turn_done()

    @contextmanager
    def being(self, place: Place, episodes: int = 1) -> Iterator[None]:
        """Counts episodes as being there."""
        self._at[place] += episodes
        try:
            yield
        finally:
            self._at[place] -= episodes

    def turn_done(self) -> None:
        """A slot comes back from a turn. Where only what is open keeps the next group from its slots, it may open."""
        self.give(1)
        if self._is_full() and not self.cautious:
            self._enough_open = min(self.max_open, self.open + self._next_size)

    def give(self, slots: int) -> None:
        self._note()
        self.free += slots
        self._serve()
        self._changed.set()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While the worker asks for tickets, its free slots count as idle."""
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
        self._enough_open = max(self.total, self._enough_open - 1)
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
        """Hand free slots to those that wait, in order."""
        while (waiting := self._served_first()) is not None and self.free >= self._least(waiting.wanted):
            slots = min(self.free, waiting.wanted)
            self.free -= slots
            waiting.grant(slots)

    def _served_first(self) -> _Turn | Reservation | None:
        """Who gets the next slots; those that no longer want any are forgotten."""
        for line in (self._begun, self._new):
            while line and not line[0].wanted:
                line.popleft()
            if line:
                return line[0]
        return None

    def _is_full(self) -> bool:
        """Whether only what is open keeps the next group from beginning."""
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


PER_ROUND = 16


class LoopYield:
    """`await loop_yield.passed()` returns at once, or in a later round of the loop, first come first served."""

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
        """A new round. Goes on until one comes in which nobody passes."""
        busy = self._left < self._per_round
        self._left = self._per_round
        while self._waiting and self._left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # one that was cancelled is
                waiting.set_result(None)
                self._left -= 1
        self._turning = busy or self._left < self._per_round
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
