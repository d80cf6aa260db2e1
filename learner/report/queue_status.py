"""Exchanges notices with the queue: shows the queue's on the terminal, and keeps the learner's own until the next step.

The terminal shows each notice once, servers that leave service and serve again, what keeps the run from learning, the
stall alarm, and who waits for whom (I7).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import msgspec

from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.report.progress import TerminalProgress
from slipstream.protocol import reasons
from slipstream.protocol.client import QueueError
from slipstream.protocol.messages import LearnerReport, Notice, Server, ServerState
from slipstream.protocol.status import Status, recurrence

ASK_EVERY_S = 2.0

TICK_EVERY_S = 1.0

# Seconds without an answer after which the terminal says so. A restart of the queue takes fewer.
SILENT_AFTER_S = 8.0

# Seconds for which a server is behind the others, or away, before that is worth a line.
SAY_OUT_AFTER_S = 4.0

# As long as a cause lasts it is shown again, lest it be lost above the steps.
SAY_CAUSE_EVERY_S = 600.0

# The queue's name for notices that the learner itself has sent.
LEARNER = "learner"

logger = logging.getLogger(__name__)


@dataclass
class _Out:
    since: float
    told: bool = False


class ServersSeen:
    """Says when servers leave service and when they serve again. The queue's notice of the first time a server is down
    is its only one."""

    def __init__(self) -> None:
        self._served: set[str] = set()
        self._out: dict[str, _Out] = {}

    def look(self, servers: Iterable[Server], notices: Iterable[str], now: float) -> Iterator[tuple[bool, str]]:
        """Take in the servers as they are now.

        Args:
            notices: Texts that were shown since the last look.
            now: Seconds, monotonic.

        Yields:
            Whether it is a warning, and the line.
        """
        shown = [*notices]
        for server in servers:
            name, state = server.name, server.state
            if any(text.startswith(f"vLLM server {name} at ") for text in shown):
                self._out.setdefault(name, _Out(now)).told = True
            if state is ServerState.SERVING:
                self._served.add(name)
                out = self._out.pop(name, None)
                if out is not None and (out.told or now - out.since >= SAY_OUT_AFTER_S):
                    yield False, f"vLLM server {name} serves again, after {now - out.since:.0f} s"
            elif state is ServerState.DRAINING:  # somebody has asked for that
                self._served.discard(name)
                self._out.pop(name, None)
            elif name in self._served:
                out = self._out.setdefault(name, _Out(now))
                lasts = state is not ServerState.STALE or now - out.since >= SAY_OUT_AFTER_S
                if not out.told and lasts and state in _OUT_OF_SERVICE:
                    out.told = True
                    yield True, f"vLLM server {name} at {server.url} is {state}: {server.reason}"


_OUT_OF_SERVICE = (ServerState.STALE, ServerState.QUARANTINED, ServerState.DOWN)


class Watch:
    """Shows the queue's reports on the terminal while it is entered, whatever the learner is doing.

    It asks on the client's loop and prints from a thread: a terminal that is held would otherwise keep leases from
    renewal.

    Attributes:
        on_status: Called with each status, from a thread.
    """

    def __init__(self, client: BlockingQueueClient, progress: TerminalProgress) -> None:
        self._client = client
        self._progress = progress
        self._told: set[tuple[str, str | None, str]] = set()
        self._servers = ServersSeen()
        self._causes: dict[str, int] = {}
        self._stalled = False
        self.on_status: Callable[[Status], None] = lambda status: None

    def __enter__(self) -> Self:
        self._client.call(lambda _: self._open())
        return self

    def __exit__(self, *error: object) -> None:
        self._client.call(lambda _: self._close())

    async def _open(self) -> None:
        self._tasks = [asyncio.create_task(self._ask()), asyncio.create_task(self._tick())]

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _ask(self) -> None:
        failed = ""
        while True:
            try:
                await asyncio.to_thread(self._tell, await self._status())
            except QueueError as error:  # the learner's own calls meet it too, and end the run
                if str(error) != failed:
                    logger.warning("the queue's status cannot be shown: %s", error)
                failed = str(error)
            await asyncio.sleep(ASK_EVERY_S)

    async def _status(self) -> Status:
        """Ask for the status, and say when the queue does not answer, and when it does again: its own words are not to
        be had then."""
        began = time.monotonic()
        asking = asyncio.ensure_future(self._client.queue.status())
        try:
            if (await asyncio.wait([asking], timeout=SILENT_AFTER_S))[0]:
                return await asking
            text = f"the queue has not answered for {SILENT_AFTER_S:.0f} s: is its process stopped, its host cut off?"
            await asyncio.to_thread(self._progress.warn, text)
            status = await asking
        finally:
            asking.cancel()
        await asyncio.to_thread(self._progress.say, f"the queue answers again, after {time.monotonic() - began:.0f} s")
        return status

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_EVERY_S)
            await asyncio.to_thread(self._progress.tick)

    def _tell(self, status: Status) -> None:
        self._progress.status = status
        of_servers = []
        for notice in status.notices:
            key = (notice.kind, notice.who, notice.text)
            if notice.who == LEARNER:
                continue  # The learner showed it when it happened.
            if key not in self._told:  # not by id: a queue that restarts counts ids again
                self._told.add(key)
                self._progress.warn(f"{notice.who}: {notice.text}" if notice.who else notice.text)
                of_servers += [notice.text] if notice.kind == reasons.SERVER else []
        for warns, text in self._servers.look(status.servers, of_servers, time.monotonic()):
            (self._progress.warn if warns else self._progress.say)(text)
        self._tell_causes(status)
        stall = status.stall
        if stall.stalled and not self._stalled:
            self._progress.warn(f"stalled: no step for {stall.since_s:.0f} s: {stall.why or 'no cause is known'}")
        if self._stalled and not stall.stalled:
            self._progress.say("no longer stalled")
        self._stalled = stall.stalled
        self.on_status(status)

    def _tell_causes(self, status: Status) -> None:
        """Show each cause when it is seen first, unless a notice has just said the same; again as long as it lasts; and
        when it is over."""
        for cause in status.diagnosis:
            times = 1 + int(cause.since_s // SAY_CAUSE_EVERY_S)
            is_new = cause.about not in self._causes
            if is_new and not any(notice.text in cause.text for notice in status.notices):
                self._progress.warn(cause.text + recurrence(cause))
            elif not is_new and times > self._causes[cause.about]:
                self._progress.warn(f"still, after {cause.since_s / 60:.0f} min: {cause.text}")
            self._causes[cause.about] = times
        for about in self._causes.keys() - {cause.about for cause in status.diagnosis}:
            del self._causes[about]
            self._progress.say(f"no longer seen: {about}")


class PendingNotices:
    """Notices of the learner that the queue has not been told yet. They travel with the next step."""

    def __init__(self) -> None:
        self._pending: list[Notice] = []

    def checkpoint(self, text: str) -> None:
        """Add a checkpoint that could not be written."""
        self._pending.append(Notice("checkpoint", text))

    def batch(self, text: str) -> None:
        """Add a batch that was left out."""
        self._pending.append(Notice("batch", text))

    def server(self, text: str) -> None:
        """Add a server whose samples are no longer as near to the learner's policy as they were."""
        self._pending.append(Notice("server", text))

    def added_to(self, report: LearnerReport) -> LearnerReport:
        """Return the report with all pending notices, which are no longer pending then."""
        pending, self._pending = self._pending, []
        return msgspec.structs.replace(report, notices=pending)
