"""Messages between a worker and its queue: heartbeats, which register the worker, renew its tickets and bring news
both ways, and the tickets that the worker gives back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from slipstream.protocol import reasons
from slipstream.protocol.client import QueueError, QueueRefused
from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import (
    Group,
    Server,
    TicketFailure,
    TicketReply,
    TicketRequest,
    WorkerReply,
    WorkerReport,
)
from slipstream.rollout_worker.user_code.values import encodable

T = TypeVar("T")

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0

_GIVE_BACK_S = 5.0

_SIGN_OFF_S = 2.0


class Heartbeat:
    """Sends heartbeats.

    Args:
        report: Gives the report to send.
        heard: Takes a reply; returns the seconds until the next heartbeat.
        session_within_s: Seconds to wait for a new session of the learner where the last one refuses the worker.
    """

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
        """Send the next heartbeat at once."""
        self._news.set()

    async def run(self) -> None:
        """Send heartbeats until the run is finished.

        Raises:
            ConfigError: This worker would make wrong data, by the queue's text; or no session of the learner began in
                time.
        """
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
        """Log a warning once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    async def when_registered(self, request: Callable[[], Awaitable[T]]) -> T:
        """Send a request that the queue takes only from registered workers. Where it no longer knows this one, as after
        its restart, the worker registers and asks again."""
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


class Queue(Protocol):
    """The part of `slipstream.protocol.client.QueueClient` that a worker uses."""

    async def tickets(self, request: TicketRequest) -> TicketReply: ...
    async def fail_ticket(self, ticket_id: str, failure: TicketFailure) -> None: ...
    async def heartbeat(self, report: WorkerReport) -> WorkerReply: ...
    async def submit(self, group: Group) -> bool: ...
    async def sign_off(self, worker_id: str) -> None: ...
    async def put_server(self, server: Server) -> Server: ...


async def give_back(queue: Queue, ticket_id: str, failure: TicketFailure) -> None:
    """Give back a ticket that gave no group. Raises `QueueError`."""
    try:
        await queue.fail_ticket(ticket_id, failure)
    except QueueRefused as refusal:
        logger.info("ticket %s no longer belonged to this worker: %s", ticket_id, refusal)


async def leave(queue: Queue, worker_id: str, ticket_ids: Sequence[str], why: str) -> None:
    """Give back the tickets of a worker that ends, and sign off.

    If the queue does not answer, the tickets expire, and a draining server waits until the worker's last heartbeat is
    old.
    """
    failure = TicketFailure(worker_id, reasons.WORKER_STOPPED, encodable(why))
    try:
        async with asyncio.timeout(_GIVE_BACK_S):
            await asyncio.gather(*(give_back(queue, ticket_id, failure) for ticket_id in ticket_ids))
    except (TimeoutError, QueueError) as error:
        logger.warning("%d tickets could not be given back: %s", len(ticket_ids), str(error) or "no answer")
        return
    try:
        async with asyncio.timeout(_SIGN_OFF_S):
            await queue.sign_off(worker_id)
    except (TimeoutError, QueueError) as error:
        why = str(error) or f"no answer within {_SIGN_OFF_S:g} s"
        logger.info("the queue did not confirm that the worker signed off: %s", why)
