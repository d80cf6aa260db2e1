"""Keeps batches ready ahead of the step: leases, renews, drops and packs, on the blocking client's loop.

A batch is judged at the version that will train on it. That is known when it is leased, as each step makes exactly one
version. No batch is leased so far ahead that whatever can be sampled now is too old for it. A drop is acknowledged at
once, because that returns its permit to the workers. Right before its step the queue is asked again: a group from a
server whose proof has failed meanwhile is not trained (I5).

A batch that is left out makes no version. The next one, which was judged for the version after, takes its place and is
judged again, and so do all that follow. Leasing other groups for the step instead could wait forever, since the groups
held for later steps may be all that admission allows.

A lease that lapses, because the queue could not be reached for longer than it lasts, is no loss: this learner is the
only one that leases, so its drafts lease their groups again, each its own. Groups that are in training meanwhile are
acknowledged as they would have been, and none gets into a second draft (I1).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Self

from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.group_spans import GroupSpans
from slipstream.learner.feed.recorded_experts import RoutedLayers
from slipstream.learner.feed.step_draft import Batch, Draft, LeasedGroup
from slipstream.protocol import codec, reasons
from slipstream.protocol.client import QueueError, QueueRefused, RunFinished
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import (
    PAUSED_BY_PERSON,
    Group,
    LearnerReport,
    LeaseAck,
    LeaseReply,
    LeaseRequest,
    RunPosition,
    ServerState,
)

logger = logging.getLogger(__name__)

LEASE_WAIT_S = 30.0
RELEASE_TIMEOUT_S = 5.0


class Starved(QueueError):
    """Neither a group nor a step came for `learner.stall_timeout_s`."""


class LeaseLost(QueueError):
    """The queue refuses to renew a lease, as another learner has begun."""


@dataclass(frozen=True)
class _Prepared:
    draft: Draft
    batch: Batch


class Feeder:
    """Batches for the steps after `start.step`, in order. A context manager: leaving it gives open leases back.

    Its methods are for the learner's main thread, except `fail`. `next_batch` raises errors of the loop.

    Args:
        start: Position of the run when the session began.
        clock: Seconds, monotonic.
        pin: Whether rows are put into page-locked memory, for a learner on a GPU.
        branches, routed: As in `Draft`.
    """

    def __init__(
        self,
        config: RunConfig,
        client: BlockingQueueClient,
        start: RunPosition,
        clock: Callable[[], float] = time.monotonic,
        pin: bool = False,
        branches: bool = True,
        routed: RoutedLayers | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._start = start
        self._clock = clock
        self._pin = pin
        self._branches, self._routed = branches, routed
        self._ready: SimpleQueue[_Prepared | BaseException] = SimpleQueue()
        self._permits = asyncio.Semaphore(config.learner.prefetch_steps)
        self._leases: dict[str, Draft] = {}
        self._leased = asyncio.Event()
        self._step = start.step + 1
        self._taken: Draft | None = None
        self._left_out: Draft | None = None
        self._lead = 0  # batches left out so far: a batch's step is its number minus this
        self._moved = asyncio.Event()
        self._renew_every_s = config.queue.lease_timeout_s / 3
        self._waiting_since: float | None = None
        self._last_arrival = clock()
        self._spans = GroupSpans(start.run)

    def __enter__(self) -> Self:
        self._client.call(lambda _: self._open())
        return self

    def __exit__(self, *error: object) -> None:
        self._client.call(lambda _: self._close())

    def next_batch(self) -> Batch:
        """Wait for the next batch.

        Raises:
            Starved: No group comes any more.
            LeaseLost: The queue refuses to renew a lease.
            RunFinished: The run was finished before the learner's last step.
            QueueError: The queue refuses, or cannot be reached.
            BaseException: The error that `fail` was called with.
        """
        self._waiting_since = self._clock()
        self._client.loop.call_soon_threadsafe(self._permits.release)
        with self._client.waiting(self._start.session, "groups"):
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            batch = self._client.call(lambda _: self._ready_to_train(item))
        self._waiting_since = None
        return batch

    def fail(self, error: BaseException) -> None:
        """End the wait for a batch with `error`. It may be called from any thread."""
        self._ready.put(error)

    def trained(self, batch: Batch, report: LearnerReport) -> RunPosition:
        """Acknowledge a batch: from here on its version is taken. Raises `QueueError` if the queue disagrees."""
        ack = LeaseAck(self._start.session, batch.ticket_ids, step=batch.step, version=batch.version + 1, report=report)
        self._leases.pop(batch.lease_id, None)
        position = self._client.call(lambda queue: queue.ack(batch.lease_id, ack))
        self._spans.trained(batch.ticket_ids, batch.step, batch.version)
        self._step += 1
        self._client.loop.call_soon_threadsafe(self._moved.set)
        if position.version != batch.version + 1:
            raise QueueError(
                f"the queue is at version {position.version} after step {batch.step}, the learner at "
                f"{batch.version + 1}: another learner works on this run; end one of them"
            )
        return position

    def leave_out(self, batch: Batch, reason: str) -> None:
        """Drop the groups of the batch that `next_batch` returned last, which cannot be trained. The next batch is for
        the same step. Raises `QueueError`."""
        self._client.call(lambda _: self._leave_out(batch, reason))

    async def _open(self) -> None:
        self._work = asyncio.create_task(self._main())

    async def _close(self) -> None:
        self._work.cancel()
        await asyncio.wait([self._work])
        # A lease that is not given back expires, so nothing is lost if the queue cannot be reached now.
        with suppress(QueueError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                for lease_id in self._leases:
                    await self._client.queue.release(lease_id, self._start.session)

    async def _main(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew_leases())
                tasks.create_task(self._produce())
        except BaseExceptionGroup as group:
            self._ready.put(group.exceptions[0])

    async def _produce(self) -> None:
        start, max_staleness = self._start, self._config.queue.max_staleness
        for number in itertools.count(start.step + 1):
            await self._permits.acquire()
            while (step := number - self._lead) > min(start.total_steps, self._step + max_staleness):
                self._moved.clear()
                await self._moved.wait()
            name = f"{start.session}-{number}"
            draft = Draft(self._config, step, self._version_at(step), name, self._branches, self._routed)
            await self._fill(draft)
            self._ready.put(_Prepared(draft, self._finished(draft)))

    def _finished(self, draft: Draft) -> Batch:
        batch = draft.finish()
        return replace(batch, rows=[row.pinned() for row in batch.rows]) if self._pin else batch

    async def _ready_to_train(self, prepared: _Prepared) -> Batch:
        """Return the batch for the step that is next, with groups that the queue has revoked since they were leased
        replaced."""
        draft, batch = prepared.draft, prepared.batch
        if draft.step != self._step or self._left_out is not None:
            if self._left_out is not None:
                draft.count(self._left_out)
                self._left_out = None
            await self._drop(draft, draft.move(self._step, self._version_at(self._step)))
            batch = await self._filled(draft)
        while revoked := await self._renew(batch.lease_id, batch.ticket_ids):
            await self._revoke(draft, revoked)
            batch = await self._filled(draft)
        self._taken = draft
        return batch

    def _version_at(self, step: int) -> int:
        return self._start.version + step - self._start.step - 1

    async def _filled(self, draft: Draft) -> Batch:
        await self._fill(draft)
        return self._finished(draft)

    async def _leave_out(self, batch: Batch, reason: str) -> None:
        draft = self._taken
        assert draft is not None
        assert draft.lease_id == batch.lease_id, "not the batch that was returned last"
        dropped = dict.fromkeys(batch.ticket_ids, reason)
        draft.revoke(dropped)
        await self._drop(draft, dropped)
        self._left_out = draft
        self._lead += 1
        self._moved.set()

    async def _drop(self, draft: Draft, dropped: Mapping[str, str]) -> None:
        if not draft.ticket_ids:
            self._leases.pop(draft.lease_id, None)
        if dropped:
            self._spans.dropped(dropped, draft.step, draft.version)
            await self._client.queue.ack(draft.lease_id, LeaseAck(self._start.session, dropped=dict(dropped)))

    async def _revoke(self, draft: Draft, revoked: Mapping[str, str]) -> None:
        draft.revoke(revoked)
        self._spans.dropped(revoked, draft.step, draft.version)
        if not draft.ticket_ids:
            self._leases.pop(draft.lease_id, None)
        # The queue has dropped the rest itself.
        tainted = {ticket: reason for ticket, reason in revoked.items() if reason == reasons.UNVERIFIED_SERVER}
        if tainted:
            await self._client.queue.ack(draft.lease_id, LeaseAck(self._start.session, dropped=tainted))

    async def _fill(self, draft: Draft) -> None:
        while draft.wanted:
            reply = await self._lease(draft)
            if reply.revoked:
                await self._revoke(draft, reply.revoked)
            elif not reply.groups:
                await self._check_alive()
            if not reply.groups:
                continue
            self._last_arrival = self._clock()
            self._leases[draft.lease_id] = draft
            self._renew_every_s = reply.expires_in_s / 3
            self._leased.set()
            groups = [codec.decode(bytes(raw), Group) for raw in reply.groups]
            if not self._of_others(draft).isdisjoint(group.ticket_id for group in groups):
                # Another draft's lease has lapsed, and its groups came here.
                await self._client.queue.release(draft.lease_id, self._start.session)
                await self._lease_anew()
                continue
            self._spans.came(groups)
            await self._drop(draft, draft.add(map(LeasedGroup, groups, reply.version_at_arrival)))

    async def _lease(self, draft: Draft) -> LeaseReply:
        wait_s = min(LEASE_WAIT_S, self._config.learner.stall_timeout_s)
        request = LeaseRequest(self._start.session, draft.lease_id, draft.wanted, have=draft.ticket_ids, wait_s=wait_s)
        return await self._client.queue.lease(request)

    async def _check_alive(self) -> None:
        """Raise if waiting longer is pointless. It only counts the time in which the step waits: before that, the
        learner is the slow one."""
        position = await self._client.queue.position()
        if position.finished:
            raise RunFinished("the run was finished before the learner's last step")
        if position.served_version is None and await self._servers_load():
            self._last_arrival = self._clock()  # the wait for groups begins when the servers are up
        since, limit = self._waiting_since, self._config.learner.stall_timeout_s
        if since is not None and self._clock() - max(since, self._last_arrival) >= limit:
            stall = (await self._client.queue.status()).stall
            raise Starved(
                f"no group came for learner.stall_timeout_s = {limit:.0f} s: "
                f"{stall.why or 'look at the workers and servers in `slipstream status`'}"
            )

    async def _servers_load(self) -> bool:
        servers = await self._client.queue.servers()
        return any(
            server.state in (ServerState.JOINING, ServerState.SYNCING)
            or (server.reason or "").startswith(PAUSED_BY_PERSON)
            for server in servers
        )

    async def _renew_leases(self) -> None:
        await self._leased.wait()
        while True:
            await asyncio.sleep(self._renew_every_s)
            for lease_id in list(self._leases):
                await self._renew(lease_id)

    async def _renew(self, lease_id: str, have: Sequence[str] = ()) -> dict[str, str]:
        """Renew a lease. Returns which groups of `have` must not be trained, and why.

        Raises:
            LeaseLost: The queue refuses, and not because the lease has lapsed.
        """
        try:
            return await self._client.queue.renew(lease_id, self._start.session, have)
        except QueueRefused as refusal:
            # A lease that was acknowledged in the meantime is rightly gone.
            if lease_id not in self._leases:
                return {}
            if refusal.reason != reasons.LEASE_LAPSED:
                raise LeaseLost(f"lease {lease_id} cannot be renewed: {refusal}") from refusal
            logger.warning("%s; leasing them again", refusal)
            lost = await self._lease_anew()
            return {ticket: reason for ticket, reason in lost.items() if ticket in have}

    async def _lease_anew(self) -> dict[str, str]:
        """Lease for each draft its own groups, where its lease has lapsed. Returns those that no draft may train, with
        their reasons."""
        lost: dict[str, str] = {}
        for lease_id, draft in list(self._leases.items()):
            request = LeaseRequest(self._start.session, lease_id, 0, have=draft.ticket_ids, wait_s=0.0)
            lost |= (await self._client.queue.lease(request)).revoked
        return lost

    def _of_others(self, draft: Draft) -> set[str]:
        """Return the groups that other drafts hold, those in training among them."""
        return {ticket for other in self._leases.values() if other is not draft for ticket in other.ticket_ids}
