"""The learner's face of weight sync: hand over a version, go on training, look at the records.

A version goes to all servers that the queue knows at once, on a thread of its own. A server that fails is quarantined
and the others go on (I5). If all fail, the same version is tried again, and then given up with `PublishError`. Between
publications, servers that (re)started are brought up to date. The queue learns the state of each server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from protocol.client import QueueClient, QueueError
from protocol.config import RunConfig
from protocol.messages import ServerState
from weight_sync.cancellation import together
from weight_sync.proof.probe import Probe
from weight_sync.server_sync import Outcome
from weight_sync.servers import Servers
from weight_sync.snapshot import Snapshot
from weight_sync.transports import build
from weight_sync.transports.base import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3
RETRY_PAUSE_S = 2.0
WATCH_EVERY_S = 2.0
# Failures in a row after which the watch between publications ends the learner; its pause doubles with each.
WATCH_FAILURES = 6
# Enough to resume a server that is paused.
CLOSE_TIMEOUT_S = 40.0

UNPROVEN = (ServerState.JOINING, ServerState.STALE)


class PublishError(RuntimeError):
    """No server could be brought up to date."""


@dataclass(frozen=True)
class PublishRecord:
    """One publication, in seconds: `snapshot_s` to copy the weights; `blocked_s`, the learner's wait, copy included;
    `transfer_s` and `pause_s` of the slowest server (see `server_sync.Outcome`). `probe_max_abs_diff`: the largest of
    all servers. `servers_failed`: the reason by server name."""

    version: int
    snapshot_s: float
    blocked_s: float
    transfer_s: float
    pause_s: float
    probe_max_abs_diff: float
    servers_ok: list[str] = field(default_factory=list)
    servers_failed: dict[str, str] = field(default_factory=dict)


class Publisher:
    """Publishes versions one at a time, in the order in which they are handed over. Use it as a context manager.

    `session`: the learner's at the queue, which alone may say that a server is proven; to be set before the first
    publication. `records` grows by one as each publication ends. `on_failure` is called, on the publisher's thread,
    with what ends the watch between publications; the next `publish` or `wait` raises it too. `make_transport` makes a
    transport for each connection to a server; by default the one that `weight_sync.transport` names.
    """

    def __init__(
        self, config: RunConfig, queue_url: str, make_transport: Callable[[], Transport] | None = None
    ) -> None:
        self.session: int | None = None
        self.records: list[PublishRecord] = []
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self._failure: BaseException | None = None
        self._config = config
        self._make_transport = make_transport or (lambda: build(config.weight_sync))
        self._queue_url = queue_url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="publisher", daemon=True)
        self._ending: Future[None] | None = None
        self._in_flight: int | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._latest: Snapshot | None = None
        # Held while `_latest` is on its way to a server or is replaced.
        self._busy = asyncio.Lock()
        self._resources = AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        self._servers: Servers = self._run(self._connect()).result()
        self._run(self._watch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._close()).result(timeout=CLOSE_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)

    @property
    def in_flight(self) -> int | None:
        """The version on its way to the servers, if any; may be read from any thread."""
        return self._in_flight

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe) -> float:
        """Take a snapshot of `weights` (names and tensors as in a checkpoint) and publish it in the background.

        Returns the seconds that the caller was held up, by the end of the publication before and by the snapshot.
        Raises what the publication before ended with: `PublishError` if it reached no server, `QueueError` if the
        queue failed.
        """
        began = time.monotonic()
        self.wait()
        self._run(self._busy.acquire()).result()
        free = time.monotonic()
        dtype: torch.dtype = getattr(torch, self._config.model.dtype)
        buffer = self._latest.flat if self._latest is not None else None
        try:
            self._latest = snapshot = Snapshot(version, weights, probe, dtype, buffer)
        except BaseException:
            self._loop.call_soon_threadsafe(self._busy.release)
            raise
        done = time.monotonic()
        self._in_flight = version
        self._ending = self._run(self._publish(snapshot, done - free, done - began))
        return done - began

    def wait(self) -> None:
        """Wait until nothing is in flight. Raises `PublishError` if it reached no server, `QueueError` if the queue
        failed, and what ended the watch between publications."""
        if self._failure is not None:
            raise self._failure
        if self._ending is not None:
            ending, self._ending = self._ending, None
            ending.result()

    async def _connect(self) -> Servers:
        client = await self._resources.enter_async_context(QueueClient(self._queue_url, self._config.token))
        servers = Servers(self._config, client, self._make_transport, lambda: self.session)
        return await self._resources.enter_async_context(servers)

    async def _publish(self, snapshot: Snapshot, snapshot_s: float, blocked_s: float) -> None:
        try:
            with self._owned():
                self.records.append(await self._publish_to_servers(snapshot, snapshot_s, blocked_s))
        finally:
            self._in_flight = None
            self._busy.release()

    async def _watch(self) -> None:
        """Between publications, bring servers that (re)started up to the latest version (F16).

        Otherwise a run whose only server restarted would stand still: no server, no groups, no next version. A watch
        that has ended would be the same.
        """
        failures = 0
        with self._owned():
            while True:
                await asyncio.sleep(WATCH_EVERY_S * 2**failures)
                if self._busy.locked() or not self.records:
                    continue
                try:
                    for server in await self._servers.known():
                        if server.state in UNPROVEN and await self._servers.is_up(server):
                            await self._catch_up(server.name)
                    failures = 0
                except QueueError as error:  # the learner's own calls meet it too, and end it
                    logger.warning("servers that restarted cannot be brought up to date: %s", error)
                except Exception as error:
                    failures += 1
                    logger.exception("servers that restarted cannot be brought up to date (failure %d)", failures)
                    if failures == WATCH_FAILURES:
                        self._failure = PublishError(
                            f"servers that restarted could not be brought up to date {failures} times in a row; the "
                            f"last time: {type(error).__name__}: {error}"
                        )
                        self._failure.__cause__ = error
                        self.on_failure(self._failure)
                        return

    async def _catch_up(self, name: str) -> None:
        """Publish the latest version to one server, unless that has happened meanwhile."""
        async with self._busy:
            for server in await self._servers.known():
                if server.name == name and server.state in UNPROVEN and self._latest is not None:
                    logger.info("%s is %s: syncing it with version %d", name, server.state, self._latest.version)
                    await self._servers.publish(server, self._latest, patience_s=0.0)

    @contextmanager
    def _owned(self) -> Iterator[None]:
        """Make `_close` wait for the calling task, which may have paused a server."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    async def _publish_to_servers(self, snapshot: Snapshot, snapshot_s: float, blocked_s: float) -> PublishRecord:
        failed: dict[str, str] = {}
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S)
            servers = await self._servers.known()
            # Wait for a server that is starting only where there is nothing better to do.
            patience_s = self._config.vllm.start_timeout_s if attempt or not self.records else 0.0
            results = await together(*(self._servers.publish(server, snapshot, patience_s) for server in servers))
            named = list(zip((server.name for server in servers), results, strict=True))
            outcomes = {name: result for name, result in named if isinstance(result, Outcome)}
            failed = {name: result for name, result in named if isinstance(result, str)}
            if outcomes:
                return PublishRecord(
                    version=snapshot.version,
                    snapshot_s=snapshot_s,
                    blocked_s=blocked_s,
                    transfer_s=max(outcome.transfer_s for outcome in outcomes.values()),
                    pause_s=max(outcome.pause_s for outcome in outcomes.values()),
                    probe_max_abs_diff=max(outcome.probe_max_abs_diff for outcome in outcomes.values()),
                    servers_ok=list(outcomes),
                    servers_failed=failed,
                )
        reasons = "; ".join(failed.values()) or "the queue knows no server"
        raise PublishError(f"version {snapshot.version} reached no vLLM server in {ATTEMPTS} attempts: {reasons}")

    async def _close(self) -> None:
        if self._tasks:
            # As they end they resume servers, for which they need the connections.
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        # A learner that a signal ended may have been waiting for the snapshot's turn.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._resources.aclose()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
