"""Keeps batches ready ahead of the step: leases, renews, drops, packs, in the queue link's thread.

A batch is judged at the version that will train on it, which is known when it is leased: each step makes exactly
one version. A drop is acknowledged at once, since it is what gives the permit back to the workers (F14).
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from learner.blocking_client import BlockingQueueClient
from learner.feed.step_draft import Batch, Draft, LeasedGroup
from protocol import codec
from protocol.client import QueueError, Refused, RunFinished
from protocol.config import RunConfig
from protocol.messages import Group, LearnerReport, LeaseAck, LeaseReply, LeaseRequest, RunPosition

LEASE_WAIT_S = 30.0
RELEASE_TIMEOUT_S = 5.0


class Starved(QueueError):
    """No group came for `learner.stall_timeout_s`."""


class LeaseLost(QueueError):
    """The queue took a lease back while its groups were here."""


class Feeder:
    """Batches for the steps after `policy.step`, in order. A context manager; leases that are open at its end are
    given back. Methods are for the learner's main thread; an error of the thread is raised by `next_batch`."""

    def __init__(
        self,
        config: RunConfig,
        link: BlockingQueueClient,
        policy: RunPosition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._link = link
        self._start = policy
        self._clock = clock
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._permits = asyncio.Semaphore(config.learner.prefetch_steps)
        self._leases: set[str] = set()
        self._leased = asyncio.Event()
        self._renew_every_s = config.queue.lease_timeout_s / 3
        self._waiting_since: float | None = None
        self._last_arrival = clock()

    def __enter__(self) -> Self:
        self._link.call(lambda _: self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.call(lambda _: self._close())

    def next_batch(self) -> Batch:
        """Wait for the next batch. Raises `Starved`, `RunFinished`, or what else ended the thread."""
        self._waiting_since = self._clock()
        self._link.loop.call_soon_threadsafe(self._permits.release)
        with self._link.waiting(self._start.session, "groups"):
            item = self._ready.get()
        self._waiting_since = None
        if isinstance(item, BaseException):
            raise item
        return item

    def trained(self, batch: Batch, report: LearnerReport) -> RunPosition:
        """Acknowledge a batch: from here on its version is taken. Raises `QueueError` if the queue disagrees."""
        ack = LeaseAck(self._start.session, batch.ticket_ids, step=batch.step, version=batch.version + 1, report=report)
        self._leases.discard(batch.lease_id)
        policy = self._link.call(lambda client: client.ack(batch.lease_id, ack))
        if policy.version != batch.version + 1:
            raise QueueError(
                f"the queue is at version {policy.version} after step {batch.step}, the learner at "
                f"{batch.version + 1}: another learner works on this run; end one of them"
            )
        return policy

    async def _open(self) -> None:
        self._work = asyncio.create_task(self._main())

    async def _close(self) -> None:
        self._work.cancel()
        await asyncio.wait([self._work])
        # The queue would take open leases back by itself once they lapse; failing to say so now loses nothing.
        with suppress(QueueError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                for lease_id in self._leases:
                    await self._link.client.release(lease_id, self._start.session)

    async def _main(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew())
                tasks.create_task(self._produce())
        except BaseExceptionGroup as group:
            self._ready.put(group.exceptions[0])

    async def _produce(self) -> None:
        start = self._start
        for step in range(start.step + 1, start.total_steps + 1):
            await self._permits.acquire()
            draft = Draft(self._config, step, start.version + step - start.step - 1, f"{start.session}-{step}")
            await self._fill(draft)
            self._ready.put(draft.finish())

    async def _fill(self, draft: Draft) -> None:
        while draft.wanted:
            reply = await self._link.client.lease(
                LeaseRequest(
                    self._start.session,
                    draft.lease_id,
                    draft.wanted,
                    have=draft.ticket_ids,
                    wait_s=min(LEASE_WAIT_S, self._config.learner.stall_timeout_s),
                )
            )
            if not reply.groups:
                await self._check_alive()
                continue
            self._last_arrival = self._clock()
            self._hold(draft.lease_id, reply)
            dropped = draft.add(_arrivals(reply))
            if not draft.ticket_ids:
                self._leases.discard(draft.lease_id)
            if dropped:
                await self._link.client.ack(draft.lease_id, LeaseAck(self._start.session, dropped=dropped))

    async def _check_alive(self) -> None:
        """Raise if waiting longer has no use. Only while the step waits: else it is the learner that holds all up."""
        if (await self._link.client.position()).finished:
            raise RunFinished("the run was finished before the learner's last step")
        since, limit = self._waiting_since, self._config.learner.stall_timeout_s
        if since is not None and self._clock() - max(since, self._last_arrival) >= limit:
            stall = (await self._link.client.status()).stall
            raise Starved(
                f"no group came for learner.stall_timeout_s = {limit:.0f} s: "
                f"{stall.why or 'look at the workers and servers in `slipstream status`'}"
            )

    def _hold(self, lease_id: str, reply: LeaseReply) -> None:
        self._leases.add(lease_id)
        self._renew_every_s = reply.expires_in_s / 3
        self._leased.set()

    async def _renew(self) -> None:
        await self._leased.wait()
        while True:
            await asyncio.sleep(self._renew_every_s)
            for lease_id in list(self._leases):
                try:
                    await self._link.client.renew(lease_id, self._start.session)
                except Refused as refusal:
                    # A lease that was acknowledged meanwhile is gone by right.
                    if lease_id in self._leases:
                        raise LeaseLost(
                            f"lease {lease_id} lapsed while its groups were in training ({refusal}): raise "
                            f"queue.lease_timeout_s, and go on with --resume"
                        ) from refusal


def _arrivals(reply: LeaseReply) -> list[LeasedGroup]:
    return [
        LeasedGroup(codec.decode(bytes(raw), Group), version)
        for raw, version in zip(reply.groups, reply.version_at_arrival, strict=True)
    ]
