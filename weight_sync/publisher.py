"""Publishes the learner's weights to the servers while the learner continues training.

The learner waits for the snapshot only. On the publisher's thread each server has a task that brings it to the newest
version and skips versions that were overtaken. A publication counts when `weight_sync.quorum` servers have it. Only the
first publication can end the run: if it does not count within `vllm.start_timeout_s`, or every server failed several
times.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from slipstream.protocol.client import QueueClient, QueueError
from slipstream.protocol.config import RunConfig
from slipstream.weight_sync.fleet.eligibility import Wanted
from slipstream.weight_sync.fleet.fleet import Fleet, FleetBroken, Registry
from slipstream.weight_sync.fleet.publications import PublishRecord, ServerMetrics
from slipstream.weight_sync.fleet.snapshots import Snapshots
from slipstream.weight_sync.ranks.leader import FollowingRanks
from slipstream.weight_sync.transports.base import Transport, build_transport, no_others
from slipstream.weight_sync.weights.snapshot import Probe

__all__ = ["PublishError", "PublishRecord", "Publisher", "ServerMetrics"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Failures of every server that end the first publication before its time is over.
ATTEMPTS = 3
# Seconds between reports of a wait to the queue.
TELL_EVERY_S = 5.0
# Seconds for the fleet's end, in which paused servers are resumed.
CLOSE_TIMEOUT_S = 40.0
# Seconds for an answer of our own thread, which only a bug can exceed. Every wait has a bound.
THREAD_TIMEOUT_S = 60.0


class PublishError(RuntimeError):
    """No server could be brought up to date."""


class Publisher:
    """Publishes the newest version that was handed over. Use it as a context manager.

    Attributes:
        by_shares: Whether each rank of the learner sends its share: `publish` then gets rank 0's, at the same time as
            the other ranks fill theirs (`follower.ShareFollower.fill`).
        session: The learner's session at the queue, which alone may report a server as proven. Set it before the first
            publication.
        run_id: The run's id, by which servers and workers tell its weights from another run's. Set it before the first
            publication.
        on_failure: Called on the publisher's thread with the error that ends its work. The next `publish` or `wait`
            raises that error too.
    """

    def __init__(
        self,
        config: RunConfig,
        queue_url: str = "",
        make_transport: Callable[[], Transport] | None = None,
        ranks: FollowingRanks | None = None,
        registry: Callable[[], AbstractAsyncContextManager[Registry]] | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        """Prepare to publish.

        Args:
            make_transport: Makes a transport for each connection to a server; by default the one that
                `weight_sync.transport` names.
            ranks: The other ranks, if each sends its share of the weights.
            registry: Makes the registry of servers; by default that of the queue at `queue_url`.
            wanted: What servers must have; by default what the run needs to sample from them.
        """
        self.by_shares = ranks is not None
        self._ranks = ranks
        self.session: int | None = None
        self.run_id = ""
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self._failure: BaseException | None = None
        self._config = config
        others = no_others if ranks is None else ranks.senders
        self._make_transport = make_transport or (lambda: build_transport(config.weight_sync, others))
        self._make_registry: Callable[[], AbstractAsyncContextManager[Registry]] = registry or (
            lambda: QueueClient(queue_url, config.token_for("learner"))
        )
        self._wanted = wanted
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="publisher", daemon=True)
        self.snapshots = Snapshots()
        self._handed: int | None = None
        self._resources = AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        self.fleet: Fleet = self._run(self._connect()).result(THREAD_TIMEOUT_S)
        self._following = self._run(self.fleet.run())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._close()).result(timeout=CLOSE_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            if self._ranks is not None:
                self._ranks.close()

    def rank_lost(self, error: BaseException) -> None:
        """Note that another rank is gone: its answers are given up, and the next `publish` or `wait` raises `error`.
        May be called on any thread."""
        self._failure = error
        if self._ranks is not None:
            self._ranks.give_up(str(error))

    @property
    def records(self) -> list[PublishRecord]:
        """The publications that counted, in the order in which they did."""
        return self.fleet.publications.records

    @property
    def in_flight(self) -> int | None:
        """The newest version that was handed over, while it does not count; may be read from any thread."""
        handed, counted = self._handed, self.fleet.publications.counted
        return handed if handed is not None and (counted is None or handed > counted) else None

    def make_room(self) -> list[int]:
        """Return the earlier versions that may still be sent. To be called before `publish`, where ranks send
        shares."""
        return self.snapshots.make_room()

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe) -> float:
        """Take a snapshot of `weights` and publish it in the background.

        Args:
            weights: Names and tensors as in a checkpoint, on any device.
            probe: Token ids and the learner's log-probs of them under `weights`, which prove the version.

        Returns:
            Seconds that the caller waited for the snapshot.

        Raises:
            Exception: The error that ended the publisher's work.
        """
        began = time.monotonic()
        self._raise_failure()
        dtype: torch.dtype = getattr(torch, self._config.model.dtype)
        self.snapshots.fill(version, weights, probe, dtype, self.run_id)
        blocked_s = time.monotonic() - began
        self._handed = version
        self._loop.call_soon_threadsafe(self.fleet.handed, version, blocked_s)
        return time.monotonic() - began

    def wait(self) -> None:
        """Wait until the newest version counts.

        The first version has `vllm.start_timeout_s`. A later one has `weight_sync.timeout_s`, and continues in the
        background after that. Time in a person's pause does not count.

        Raises:
            PublishError: The first version did not count in time, or every server failed several times.
            QueueError: The queue failed.
            Exception: The error that ended the publisher's work.
        """
        self._raise_failure()
        if self._handed is None:
            return
        waiting = self._run(self._until_counted(self._handed))
        deadline_s = self._config.vllm.start_timeout_s + self._config.weight_sync.timeout_s + THREAD_TIMEOUT_S
        while True:
            try:
                waiting.result(deadline_s)
                return
            except concurrent.futures.TimeoutError:
                if waiting.done():
                    raise
                if not self.fleet.paused_by_user:
                    waiting.cancel()
                    raise PublishError("the publisher's own thread does not answer: see its log") from None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _connect(self) -> Fleet:
        self._registry = registry = await self._resources.enter_async_context(self._make_registry())
        fleet = Fleet(
            self._config,
            registry,
            self._make_transport,
            lambda: self.session,
            self.snapshots,
            self._ended_by,
            lambda: self.run_id,
            self._wanted,
        )
        return await self._resources.enter_async_context(fleet)

    async def _until_counted(self, version: int) -> None:
        fleet, first = self.fleet, self.fleet.publications.counted is None
        patience_s = self._config.vllm.start_timeout_s if first else self._config.weight_sync.timeout_s
        left, said_at = patience_s, 0.0
        before = time.monotonic()
        try:
            while True:
                counted = fleet.publications.counted
                if counted is not None and counted >= version:
                    return
                self._raise_failure()
                if fleet.queue_error is not None:
                    raise fleet.queue_error
                if not fleet.paused_by_user:
                    left -= time.monotonic() - before
                before = time.monotonic()
                if left <= 0 or (first and fleet.all_failed(ATTEMPTS)):
                    self._not_counted(version, first, patience_s - left)
                    return
                changed = fleet.changed
                if before - said_at >= TELL_EVERY_S:
                    said_at = before
                    await self._tell(self._awaited(version), loading=first)
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(TELL_EVERY_S, max(left, 0.01), 1.0)):
                        await changed.wait()
        finally:
            if said_at:
                await self._tell(None)

    def _not_counted(self, version: int, first: bool, after_s: float) -> None:
        fleet, quorum = self.fleet, self._config.weight_sync.quorum
        has = len(fleet.publications.reached(version))
        text = (
            f"version {version} reached {has} vLLM servers of the {quorum} of weight_sync.quorum in {after_s:.1f} s: "
            f"{fleet.describe_missing(version)}"
        )
        if not first:
            logger.error("%s; it continues in the background", text)
            return
        fleet.publications.give_up()
        self._handed = None
        raise PublishError(text)

    def _awaited(self, version: int) -> str:
        has = len(self.fleet.publications.reached(version))
        quorum = self._config.weight_sync.quorum
        return f"version {version} on {quorum} servers, {has} have it: {self.fleet.describe_waits()}"

    async def _tell(self, what: str | None, loading: bool = False) -> None:
        """Report to the queue what the learner waits for, for the status (I7). The wait continues if the queue is
        silent."""
        if what is not None:
            logger.info("waiting for %s", what)
        if self.session is None:
            return
        text = what and f"{'loading: ' if loading else ''}{what}"
        with suppress(QueueError, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._registry.waiting(self.session, text)

    def _ended_by(self, error: BaseException) -> None:
        if isinstance(error, FleetBroken):
            failure = PublishError(str(error))
            failure.__cause__ = error.__cause__
            error = failure
        self._failure = error
        self.on_failure(error)

    async def _close(self) -> None:
        self._following.cancel()
        await self._resources.aclose()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
