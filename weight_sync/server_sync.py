"""One version onto one server: transfer beside generation, pause for the swap alone, proof by probe.

What each outcome leaves behind: before the swap the server has its old weights whole; after it, the new ones,
which count only when the probe agrees. Generation is resumed on every path, cancellation among them (I6).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from weight_sync.cancellation import on_thread, to_its_end
from weight_sync.server_control import ControlError, ServerControl
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
        self.control = control
        self._make_link = make_link
        self._tolerance = tolerance
        self._link: Link | None = None
        self._label: str | None = None
        self._proven = False

    @property
    def connected(self) -> bool:
        return self._link is not None

    async def publish(self, snapshot: Snapshot) -> Outcome:
        """Raises ControlError, TransferError or ProbeMismatch; the next call then starts from a new link."""
        try:
            return await self._publish(snapshot)
        except BaseException:
            await self.disconnect()
            raise

    async def disconnect(self) -> None:
        link, self._link, self._label = self._link, None, None
        self._proven = False
        if link is not None:
            await on_thread(link.close)

    async def _publish(self, snapshot: Snapshot) -> Outcome:
        link = await self._connected()
        began = time.monotonic()
        await self.control.start_update()
        await self.control.update(link.update_info(snapshot))
        await on_thread(link.send, snapshot)
        transferred = time.monotonic()
        await self._swap(str(snapshot.version))
        resumed = time.monotonic()
        difference = snapshot.probe.max_abs_diff(await self.control.score(snapshot.probe.token_ids))
        if not difference <= self._tolerance:
            raise ProbeMismatch(
                f"{self.control.url}: log-probs after version {snapshot.version} differ by {difference:.2g} from the "
                f"learner's, more than weight_sync.probe_tolerance = {self._tolerance:g}"
            )
        self._proven = True
        return Outcome(transferred - began, resumed - transferred, difference)

    async def _swap(self, label: str) -> None:
        try:
            # Prefixes are kept apart by version; only another learner may have used the same numbers before.
            await self.control.pause(clear_cache=not self._proven)
            await self.control.finish_update(label)
        finally:
            # The label is set while paused, so that no token can carry the version of other weights.
            await to_its_end(self.control.resume())
        self._label = label

    async def _connected(self) -> Link:
        """The link, made anew where there is none or where the server is not the one that we left."""
        if self._link is not None:
            label = await self.control.weight_label()
            if label == self._label:
                return self._link
            logger.warning(
                "%s holds weights %r, not %r: it restarted, syncing it anew", self.control.url, label, self._label
            )
            await self.disconnect()
        workers = await self.control.world_size()
        await self._close_old_session()
        self._link = link = await on_thread(self._make_link, workers)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self.control.init_transfer(link.init_info()))
                both.create_task(on_thread(link.connect))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        self._label = await self.control.weight_label()
        return link

    async def _close_old_session(self) -> None:
        """End what a learner that died, or a failed publication, may have left: an open update, a group, a pause."""
        try:
            await self.control.shutdown_transfer()
        except ControlError:
            # vLLM keeps the group while an update is open.
            with contextlib.suppress(ControlError):
                await self.control.abandon_update()
            await self.control.shutdown_transfer()
        await self.control.resume()


PUBLICATION_ERRORS = (ControlError, TransferError, ProbeMismatch)
