"""Requests that wait: for groups or the end of an evaluation, where all are woken, and for tickets, in a line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Self

MAX_WAIT_S = 60.0  # longest wait of one long-poll

# Polls of one worker at a time. It has one, and for a while more whose connections broke.
MAX_POLLS = 8


class WakeUp:
    """Wakes everyone who listens, and loses no wake-up.

    Call `listen` before looking at the state, then `wait` for its event: a change between the look and the wait has
    set that event already.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def listen(self) -> asyncio.Event:
        return self._event

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event. Returns whether it came within `timeout_s` seconds."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Place:
    """A poll of a worker, and its place in a `TicketLine`. It has both only within its `with`.

    Attributes:
        has_waited: Whether it stood in the line.
    """

    def __init__(
        self, line: TicketLine, worker_id: str, serving: Collection[str], has_left: Callable[[], Awaitable[bool]]
    ) -> None:
        self.worker_id = worker_id
        self.serving = serving
        self.has_left = has_left
        self.has_waited = False
        self._line = line
        self._called = asyncio.Event()
        self._is_over = False

    @property
    def is_called(self) -> bool:
        """Whether it was woken and has not begun to wait again."""
        return self._called.is_set()

    def call(self) -> None:
        self._called.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until it is called. Returns whether it was, within `timeout_s` seconds and before it was ended."""
        if self._is_over:
            return False
        self.has_waited = True
        self._line.stand(self)
        return await wait(self._called, timeout_s) and not self._is_over

    def end(self) -> None:
        """Let it wait no longer, since nobody is there to be answered."""
        self._is_over = True
        self._called.set()

    def stand_again(self) -> None:
        self._called.clear()

    def __enter__(self) -> Self:
        self._line.polls.setdefault(self.worker_id, set()).add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.leave(self)


class TicketLine:
    """The requests that wait for tickets, in the order in which they came.

    A permit that comes free wakes the first of them only: the cost of a permit does not grow with those who wait. A
    request that was called and takes nothing, since its worker has left, passes its turn on as it leaves.

    Args:
        permits: Returns how many tickets may be issued now.

    Attributes:
        polls: Requests that are being answered, by worker.
    """

    def __init__(self, permits: Callable[[], int]) -> None:
        self.polls: dict[str, set[Place]] = {}
        self._permits = permits
        self._places: dict[Place, None] = {}
        self._called: set[Place] = set()

    def __len__(self) -> int:
        return len(self._places)

    def place(self, worker_id: str, serving: Collection[str], has_left: Callable[[], Awaitable[bool]]) -> Place:
        """Return a place for a request; it stands in the line once it waits.

        Args:
            worker_id: Who asks.
            serving: Names of the servers that the worker uses.
            has_left: Tells whether it has hung up.
        """
        return Place(self, worker_id, serving, has_left)

    async def has_room_for(self, worker_id: str) -> bool:
        """Tell whether a worker may have one request more. Those that have hung up make room."""
        polls = self.polls.get(worker_id, set())
        if len(polls) >= MAX_POLLS:
            for place in [place for place in list(polls) if await place.has_left()]:
                place.end()
                self.leave(place)
        return len(polls) < MAX_POLLS

    @property
    def spoken_for(self) -> int:
        """Number of requests that were called and have not taken their tickets yet; a newcomer leaves them theirs."""
        return len(self._called)

    def stand(self, place: Place) -> None:
        """Let a request wait at its place, which it keeps if it stood in the line before."""
        self._called.discard(place)
        place.stand_again()
        self._places.setdefault(place)

    def leave(self, place: Place) -> None:
        """Take a request out of the line, and pass on what it leaves."""
        if (polls := self.polls.get(place.worker_id)) is not None:
            polls.discard(place)
            if not polls:
                del self.polls[place.worker_id]
        self._called.discard(place)
        if place in self._places:
            del self._places[place]
            self.call_next()

    def call_next(self) -> None:
        """Call as many of the first as there are permits."""
        if not self._places:
            return
        count = self._permits() - len(self._called)
        for place in self._places if count > 0 else ():
            if not place.is_called:
                self._call(place)
                count -= 1
                if not count:
                    return

    def call_if(self, wanted: Callable[[Place], bool]) -> None:
        """Call those for whom `wanted` is true, whatever permits there are."""
        for place in self._places:
            if not place.is_called and wanted(place):
                self._call(place)

    def _call(self, place: Place) -> None:
        self._called.add(place)
        place.call()
