"""How many episodes a worker lets generate, how many it has open, and how much of that was idle for want of tickets.

A slot is held while a turn is sampled, and at no other time: an episode that waits for a tool, a reset or a judge
leaves its slot to others. Turns of episodes that have begun come before first turns, and both before new tickets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


class Reservation:
    """Slots that a ticket holds from its start, for its episodes' first turns. Each is given back once."""

    def __init__(self, capacity: Capacity, count: int) -> None:
        self._capacity = capacity
        self._left = count

    def give(self, count: int = 1) -> None:
        """An episode's first turn is done, or will not be: let others have its slot."""
        given = min(count, self._left)
        self._left -= given
        self._capacity.give(given)

    def give_all(self) -> None:
        """Before the episodes wait for something else; they then take slots as they need them."""
        self.give(self._left)


class Capacity:
    """Slots for `total` episodes that generate, and room for `most_open` episodes in all. `clock`: seconds,
    monotonic."""

    def __init__(self, total: int, most_open: int, clock: Callable[[], float]) -> None:
        self.total = total
        self.most_open = max(total, most_open)
        self.free = total
        self.open = 0
        self._clock = clock
        self._changed = asyncio.Event()
        # Turns of episodes that have begun, and first turns, that wait for a slot.
        self._begun: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()
        self._asking = False
        self._idle_s = 0.0
        self._noted_at = clock()

    @property
    def generating(self) -> int:
        return self.total - self.free

    @property
    def waited_s(self) -> float:
        """Seconds that the worker asked for tickets, each times the share of its slots that was free."""
        self._note()
        return self._idle_s

    def room(self, group_size: int) -> int:
        """Groups of so many episodes that may begin now; a group larger than all slots begins when it is alone."""
        fit = min(self.free // group_size, (self.most_open - self.open) // group_size)
        return max(0, fit) or int(self.open == 0 and self.free == self.total)

    async def wait_for_room(self, group_size: int) -> None:
        while not self.room(group_size):
            self._changed.clear()
            await self._changed.wait()

    def begin(self, episodes: int) -> Reservation:
        """A ticket's episodes are open from now on, and hold slots for their first turns."""
        self._note()
        self.open += episodes
        held = min(episodes, max(self.free, 0))
        self.free -= held
        return Reservation(self, held)

    def end(self, episodes: int, reservation: Reservation) -> None:
        reservation.give_all()
        self.open -= episodes
        self._changed.set()

    @asynccontextmanager
    async def turn(self, begun: bool = True) -> AsyncIterator[None]:
        """A slot for one turn; `begun`: of an episode that has sampled a turn before."""
        await self._slot(self._begun if begun else self._new)
        try:
            yield
        finally:
            self.give(1)

    def give(self, slots: int) -> None:
        self._note()
        self.free += slots
        while self.free > 0 and (self._begun or self._new):
            waiting = (self._begun or self._new).popleft()
            if not waiting.done():  # one that was cancelled is
                self.free -= 1
                waiting.set_result(None)
        self._changed.set()

    async def _slot(self, line: deque[asyncio.Future[None]]) -> None:
        self._note()
        if self.free > 0:
            self.free -= 1
            return
        waiting = asyncio.get_running_loop().create_future()
        line.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.give(1)
            raise

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

    def _note(self) -> None:
        now = self._clock()
        if self._asking:
            self._idle_s += (now - self._noted_at) * max(self.free, 0) / self.total
        self._noted_at = now
