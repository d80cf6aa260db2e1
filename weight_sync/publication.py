"""One version onto one server: transfer beside generation, pause for the swap alone, proof by probe.

What each outcome leaves behind: before the swap the server has its old weights whole; after it, the new ones,
which count only when the probe agrees. Generation is resumed on every path (I6).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from weight_sync.control import ControlError, ServerControl
from weight_sync.snapshot import Snapshot
from weight_sync.transports.base import Link, TransferError

logger = logging.getLogger(__name__)


class ProbeMismatch(RuntimeError):
    """The server computes with other weights than were sent."""


@dataclass(frozen=True)
class Outcome:
    """Seconds of the parts of one publication to one server, and the probe's largest difference in log-prob."""

    transfer_s: float
    pause_s: float
    probe_max_abs_diff: float


class ServerPublication:
    """Keeps the link to one server and knows which version it last proved there."""

    def __init__(self, control: ServerControl, make_link: Callable[[int], Link], tolerance: float) -> None:
        """`make_link(workers)` opens the learner's end of a link to that many workers."""
        self._control = control
        self._make_link = make_link
        self._tolerance = tolerance
        self._link: Link | None = None
        self._label: str | None = None

    async def publish(self, snapshot: Snapshot) -> Outcome:
        """Raises ControlError, TransferError or ProbeMismatch; the next call then starts from a new link."""
        try:
            return await self._publish(snapshot)
        except BaseException:
            await self.disconnect()
            raise

    async def disconnect(self) -> None:
        link, self._link, self._label = self._link, None, None
        if link is not None:
            await asyncio.to_thread(link.close)

    async def _publish(self, snapshot: Snapshot) -> Outcome:
        link = await self._connected()
        began = time.monotonic()
        await self._control.start_update()
        await self._control.update(link.update_info(snapshot))
        await asyncio.to_thread(link.send, snapshot)
        transferred = time.monotonic()
        await self._swap(str(snapshot.version))
        resumed = time.monotonic()
        difference = snapshot.probe.max_abs_diff(await self._control.score(snapshot.probe.token_ids))
        if not difference <= self._tolerance:
            raise ProbeMismatch(
                f"{self._control.url}: log-probs after version {snapshot.version} differ by {difference:.2g} from the "
                f"learner's, more than weight_sync.probe_tolerance = {self._tolerance:g}"
            )
        return Outcome(transferred - began, resumed - transferred, difference)

    async def _swap(self, label: str) -> None:
        try:
            await self._control.pause()
            await self._control.finish_update(label)
        finally:
            # The label is set while paused, so that no token can carry the version of other weights.
            await self._control.resume()
        self._label = label

    async def _connected(self) -> Link:
        """The link, made anew where there is none or where the server is not the one that we left."""
        if self._link is not None:
            label = await self._control.weight_label()
            if label == self._label:
                return self._link
            logger.warning(
                "%s holds weights %r, not %r: it restarted, syncing it anew", self._control.url, label, self._label
            )
            await self.disconnect()
        workers = await self._control.world_size()
        await self._close_old_session()
        link = await asyncio.to_thread(self._make_link, workers)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._control.init_transfer(link.init_info()))
                both.create_task(asyncio.to_thread(link.connect))
        except ExceptionGroup as group:
            await asyncio.to_thread(link.close)
            raise group.exceptions[0] from group
        self._link = link
        self._label = await self._control.weight_label()
        return link

    async def _close_old_session(self) -> None:
        """End what a learner that died, or a failed transfer, may have left: an open update, a pause, a group.

        `finish` first ends the update; where weights had half arrived it fails once and succeeds then. A pause
        left by a learner that was killed between pause and resume is undone here.
        """
        for _ in range(2):
            try:
                await self._control.finish_update(None)
                break
            except ControlError as error:
                logger.debug("no update to close: %s", error)
        try:
            await self._control.shutdown_transfer()
        except ControlError as error:
            logger.debug("no transfer to shut down: %s", error)
        await self._control.resume()


PUBLICATION_ERRORS = (ControlError, TransferError, ProbeMismatch)
