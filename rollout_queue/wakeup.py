"""A wake-up that cannot be lost."""

from __future__ import annotations

import asyncio

MAX_WAIT_S = 60.0  # longest wait of one long-poll


class WakeUp:
    """Wakes everyone who listens. Call `listen()` before looking at the state, then `wait` for its event: a change
    between the look and the wait has set that event already (F8)."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def listen(self) -> asyncio.Event:
        return self._event

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event came within `timeout_s` seconds."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        return False
    return True
