"""The worker's standing with the queue: heartbeats register it, renew its tickets, and bring news both ways."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from protocol import reasons
from protocol.client import QueueRefused
from protocol.config import ConfigError
from protocol.messages import WorkerReply, WorkerReport

T = TypeVar("T")

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0


class Heartbeat:
    """`report`: what to say now; `heard`: takes an answer, and gives the seconds until the next heartbeat;
    `session_within_s`: for how long to wait for a learner's session where the one before does not let the worker in."""

    def __init__(
        self,
        send: Callable[[WorkerReport], Awaitable[WorkerReply]],
        report: Callable[[], WorkerReport],
        heard: Callable[[WorkerReply], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        session_within_s: float = 600.0,
    ) -> None:
        self._send = send
        self._report = report
        self._heard = heard
        self._sleep = sleep
        self._session_within_s = session_within_s
        self._known = asyncio.Event()
        self._news = asyncio.Event()
        self._warned: set[str] = set()

    def now(self) -> None:
        """Send one without waiting: there is something to say, or to ask."""
        self._news.set()

    async def run(self) -> None:
        """Until the run is finished. Raises `ConfigError` with the queue's text where this worker would make wrong
        data, at once if the learner's session says so, else if no session begins in time."""
        awaited_s = 0.0
        while True:
            self._news.clear()
            try:
                reply = await self._send(self._report())
            except QueueRefused as refusal:
                if refusal.reason == reasons.FINGERPRINT:
                    raise ConfigError(str(refusal)) from None
                if refusal.reason != reasons.SESSION_AWAITED:
                    raise
                if awaited_s >= self._session_within_s:
                    raise ConfigError(
                        f"{refusal} (no session began within vllm.start_timeout_s = {self._session_within_s:g} s)"
                    ) from None
                self._known.clear()
                self._warn(str(refusal))
                await self._sleep(_PAUSE_S)
                awaited_s += _PAUSE_S
                continue
            awaited_s = 0.0
            self._known.set()
            for warning in reply.warnings:
                self._warn(warning)
            pause = self._heard(reply)
            if reply.finished:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()

    def _warn(self, text: str) -> None:
        """Once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    async def when_registered(self, request: Callable[[], Awaitable[T]]) -> T:
        """The answer to a request that the queue takes from workers that it knows. Where it knows this one no more, as
        after its restart, the worker registers and asks again."""
        for tries in itertools.count():
            if tries > 1:
                await self._sleep(_PAUSE_S)
            await self._known.wait()
            try:
                return await request()
            except QueueRefused as refusal:
                if refusal.reason != reasons.UNREGISTERED:
                    raise
            self._known.clear()
            self.now()
        raise AssertionError("unreachable: the loop returns or raises")
