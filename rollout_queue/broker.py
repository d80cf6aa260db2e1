"""The queue itself, without HTTP: ledger, fleet and admission in memory, kept in step with the store.

Every change goes the same way, one at a time: decide, commit, apply. If a commit fails the broker answers nothing more
(fail-stop), so that memory and disk never tell different stories.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from protocol.config import RunConfig
from protocol.messages import RunPosition, Server, ServerState
from rollout_queue.ledger import tickets
from rollout_queue.ledger.admission import Admission, Grant, Load
from rollout_queue.ledger.ledger import Ledger
from rollout_queue.ledger.records import Decision, StoreContents, TicketState
from rollout_queue.ledger.refusal import Refusal
from rollout_queue.ledger.servers import UNVERIFIED_SERVER, Fleet
from rollout_queue.observe.observations import Observations
from rollout_queue.store.base import Store, StoreError
from rollout_queue.wakeup import WakeUp

P = ParamSpec("P")
T = TypeVar("T")

_FREES_ROOM = frozenset({TicketState.DROPPED, TicketState.REISSUED, TicketState.TRAINED})


@dataclass(frozen=True)
class Clock:
    """`monotonic` times the deadlines, `wall` stamps what people read; both in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class Broker:
    """Use `running` around it. `on_failure` is called once if the store fails."""

    def __init__(self, config: RunConfig, store: Store, clock: Clock) -> None:
        self.config = config
        self.store = store
        self.clock = clock
        self.ready = False
        self.closing = False
        self.failure: str | None = None
        self.lock = asyncio.Lock()
        self.groups_came = WakeUp()
        self.room_came = WakeUp()
        self.admission = Admission(config)
        self.fleet = Fleet()
        self.ledger = Ledger(config, StoreContents(), self.now)
        self.observations = Observations(self.now)
        self.on_failure: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the store, watch over deadlines, and close the store at the end."""
        try:
            snapshot = await self.call(self.store.load)
            self.ledger = Ledger(self.config, snapshot, self.now)
            self.fleet = Fleet(snapshot.servers)
            await self._register_configured_servers()
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._expire_when_due())
                self.ready = True
                yield
                self.ready = False
                watch.cancel()
        finally:
            self._thread.submit(self.store.close)
            self._thread.shutdown()

    def close_waits(self) -> None:
        """End all long-polls, empty-handed: the service is about to stop."""
        self.closing = True
        self.groups_came.notify()
        self.room_came.notify()

    def check_ready(self) -> None:
        """Raises a 503 `Refusal`, which clients try again, while the store is not loaded or has failed."""
        if self.failure is not None:
            raise Refusal(503, "store_failed", self.failure)
        if not self.ready:
            raise Refusal(503, "not_ready", "the queue is loading its store: try again in a moment")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a store call in the store's own thread."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        except StoreError as error:
            self._fail(str(error))
            raise Refusal(503, "store_failed", str(error)) from error

    async def commit(self, decision: Decision, payloads: Mapping[str, bytes] | None = None) -> None:
        """Put a decision on disk, then into memory. The caller holds `lock` since before it decided."""
        self.check_ready()
        if not decision:
            return
        try:
            await self.call(self.store.commit, decision, payloads or {})
        except BaseException as error:
            # Cancelled, or broken in an unforeseen way: the disk may be ahead of memory now.
            self._fail(f"a change was not completed: {error!r}; start the queue again")
            raise
        self._apply(decision)

    async def expire(self) -> None:
        """End what lapsed. Its holder will be told when it comes back."""
        async with self.lock:
            lapsed = {record.lease_id for record in self.ledger.lapsed(self.now) if record.lease_id is not None}
            await self.commit(tickets.expire(self.ledger, self.now))
            self.ledger.lapsed_leases |= lapsed

    async def put_server(self, wanted: Server) -> Server:
        """Register a server or move it to another state; a failed proof drops what it tainted (I5)."""
        async with self.lock:
            record = self.fleet.decide(wanted, self.clock.wall(), self.ledger.issued)
            if record is None:
                return next(server for server in self.fleet.servers if server.name == wanted.name)
            tainted = []
            if wanted.state is ServerState.QUARANTINED:
                tainted = Fleet([record]).tainted(self.ledger.tickets(TicketState.READY))
            await self.commit(Decision(tickets.drop(tainted, UNVERIFIED_SERVER), server=record))
            return record.server

    def grant(self) -> Grant:
        """How many tickets may be issued now."""
        run = self.ledger.run
        load = Load(self.ledger.outstanding, self.ledger.bytes, run.version, self.fleet.served_version, run.session)
        return self.admission.grant(load)

    def policy(self) -> RunPosition:
        run = self.ledger.run
        return RunPosition(
            version=run.version,
            step=run.step,
            total_steps=run.total_steps,
            session=run.session,
            checkpoint_step=run.checkpoint_step,
            served_version=self.fleet.served_version,
            finished=run.finished,
        )

    async def _register_configured_servers(self) -> None:
        known = {server.name: server.url for server in self.fleet.servers}
        for name, url in self.config.server_names.items():
            if known.get(name) != url:
                record = self.fleet.decide(Server(name, url), self.clock.wall(), self.ledger.issued)
                decision = Decision(server=record)
                await self.call(self.store.commit, decision, {})
                self._apply(decision)

    async def _expire_when_due(self) -> None:
        while self.failure is None:
            await asyncio.sleep(max(0.05, self.ledger.next_deadline(self.now) - self.now))
            try:
                await self.expire()
            except Refusal:
                return  # the store failed; the service is told by `on_failure`

    def _apply(self, decision: Decision) -> None:
        self.ledger.apply(decision, self.now)
        if decision.server is not None:
            self.fleet.apply(decision.server)
        self._wake(decision)

    def _wake(self, decision: Decision) -> None:
        states = {record.state for record in decision.tickets}
        moved = decision.run is not None
        if moved or TicketState.READY in states:
            self.groups_came.notify()
        if moved or decision.server is not None or states & _FREES_ROOM:
            self.room_came.notify()

    def _fail(self, message: str) -> None:
        if self.failure is None:
            self.failure = message
            self.close_waits()
            self.on_failure()
