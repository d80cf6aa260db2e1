"""The queue without HTTP: ledger, servers and admission in memory, kept in step with the store.

Every change goes one way, one at a time: take the lock, decide, commit to the store, apply to memory. Once a commit
fails the broker answers nothing more, so that memory and store never differ.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from protocol import reasons
from protocol.addresses import normal_url
from protocol.config import RunConfig
from protocol.messages import RunPosition, Server, ServerState
from protocol.status import Evaluation
from protocol.trained_record import RECORD_FOLDER
from protocol.versions import new_run_id
from rollout_queue.broker.recorder import Recorder, heads
from rollout_queue.ledger import evaluations, servers, tickets
from rollout_queue.ledger.admission import Admission, Grant, QueueLoad
from rollout_queue.ledger.early_failure import EarlyFailureCheck
from rollout_queue.ledger.ledger import Ledger
from rollout_queue.ledger.records import Decision, Refusal, ServerRecord, StoreContents, TicketState
from rollout_queue.ledger.registration import WorkerRegistry
from rollout_queue.ledger.server_registry import ServerRegistry
from rollout_queue.observe.observations import Observations
from rollout_queue.store.base import Store, StoreError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAIT_S = 60.0  # longest wait of one long-poll
_FREES_ROOM = frozenset({TicketState.DROPPED, TicketState.REISSUED, TicketState.TRAINED, TicketState.EVALUATED})


class WakeUp:
    """Wakes everyone who listens, and loses no wake-up.

    Call `listen` before looking at the state, then `wait` for its event: a change between the look and the wait has
    set that event already.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def listen(self) -> asyncio.Event:
        return self._event

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event. Returns whether it came within `timeout_s` seconds."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True)
class Clock:
    """The queue's clocks, seconds: `monotonic` for deadlines, `wall` for times that people read."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class Broker:
    """Holds the queue's state and commits its changes. Use it within `running`.

    Attributes:
        lock: Held from a decision until it is applied.
        judging: Held while a group is validated: one at a time, since several threads of Python would keep the loop
            waiting.
        failure: Why the store failed; None while it works.
        on_failure: Called once if the store fails.
        closing: Whether long-polls are answered at once, since the service ends.
    """

    def __init__(self, config: RunConfig, store: Store, clock: Clock) -> None:
        self.config = config
        self.store = store
        self.clock = clock
        self.ready = False
        self.closing = False
        self.failure: str | None = None
        self.lock = asyncio.Lock()
        self.judging = asyncio.Lock()
        self.groups_came = WakeUp()
        self.room_came = WakeUp()
        self.evaluations_ended = WakeUp()
        self.admission = Admission(config)
        self.fleet = ServerRegistry()
        self.ledger = Ledger(config, StoreContents(), self.now)
        self.registry = WorkerRegistry(config.queue.max_workers)
        self.early_failures = EarlyFailureCheck(config)
        # Notices name it in commands. Without `slipstream up` only the user knows its real name.
        run_file = config.run_file if config.run_file.is_file() else Path("run.toml")
        self.observations = Observations(
            self.now,
            config.learner.groups_per_step,
            config.vllm.start_timeout_s,
            config.queue.max_workers,
            run_file,
        )
        record = config.run_dir / RECORD_FOLDER
        self.recorder = Recorder(record, config.queue.record_bytes) if config.queue.record else None
        self.on_failure: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the store, watch the deadlines, and close the store at the end."""
        try:
            contents = await self.call(self.store.load)
            if not contents.run.id:
                contents.run = msgspec.structs.replace(contents.run, id=new_run_id(self.config.run.name))
                await self.call(self.store.commit, Decision((), contents.run), {})
            learner = self.config.learner
            if contents.run.finished and (learner.epochs is not None or contents.run.step < learner.steps):
                # The run may be resumed with more steps; with `epochs` the data set decides how many. A worker that is
                # up before the learner must not end.
                contents.run = msgspec.structs.replace(contents.run, finished=False)
            self.ledger = Ledger(self.config, contents, self.now)
            self.fleet = ServerRegistry(contents.servers)
            self.early_failures.begin(self.ledger.ever_accepted)
            self.ready = True
            for name, given in self.config.server_names.items():
                url = normal_url(given)
                if not self.fleet.has_had(name, url):
                    async with self.lock:
                        known = self.fleet.get(name)
                        if known is not None and known.state is ServerState.DRAINING:
                            # It has another address, which the run file names no more. It would keep the name taken.
                            await self.commit(servers.remove(self.fleet, self.ledger, [name]))
                        await self.commit(servers.put(self.fleet, self.ledger, Server(name, url), self.clock.wall()))
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._expire_when_due())
                yield
                self.ready = False
                watch.cancel()
        finally:
            self._thread.submit(self.store.close)
            if self.recorder is not None:
                self._thread.submit(self.recorder.close)
            self._thread.shutdown()

    def close_waits(self) -> None:
        """Answer all long-polls with nothing, since the service is about to stop."""
        self.closing = True
        self.groups_came.notify()
        self.room_came.notify()
        self.evaluations_ended.notify()

    def check_ready(self) -> None:
        """Refuse all requests while the store has failed (STORE_FAILED) or is not loaded (NOT_READY)."""
        if self.failure is not None:
            raise Refusal(reasons.STORE_FAILED, self.failure)
        if not self.ready:
            raise Refusal(reasons.NOT_READY, "the queue is loading its store: try again in a moment")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the store, in its own thread."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        except StoreError as error:
            self._fail(str(error))
            raise Refusal(reasons.STORE_FAILED, str(error)) from error

    async def record(self, lease: str, decision: Decision) -> None:
        """Write the groups that an acknowledgement trains into the run's record. Call it before the commit."""
        recorder = self.recorder
        found = heads(lease, decision.tickets, self.ledger.run) if recorder is not None else []
        if recorder is None or not found:
            return

        def payload(ticket_id: str) -> bytes | None:
            return self.store.payloads([ticket_id]).get(ticket_id)

        if (failure := await self.call(recorder.append, found, payload)) is not None:
            logger.error("%s", failure)
            self.observations.notices.say("record", failure, self.now)

    async def commit(self, decision: Decision, payloads: Mapping[str, bytes] | None = None) -> None:
        """Put a decision, and the ends of evaluations that follow from it, into the store, then into memory.

        The caller has held `lock` since before it decided.

        Args:
            payloads: Bodies of new groups, by ticket id.

        Raises:
            Refusal: STORE_FAILED, NOT_READY, or OUT_OF_RANGE for a number that the store cannot hold.
        """
        self.check_ready()
        if not decision:
            return
        decision = evaluations.with_ends(self.ledger, self.fleet, decision, self.clock.wall())
        try:
            await self.call(self.store.commit, decision, payloads or {})
        except OverflowError as error:
            # Nothing was stored, so memory and store still agree.
            raise Refusal(reasons.OUT_OF_RANGE, f"a number is beyond what the store can hold: {error}") from error
        except BaseException as error:
            # Cancelled, or broken unexpectedly: the store may be ahead of memory now.
            self._fail(f"a change was not completed: {error!r}; start the queue again")
            raise
        self.ledger.apply(decision, self.now)
        for server in decision.servers:
            self.fleet.apply(server)
        try:
            self.observations.decided(decision, self.now)
        except Exception:  # the change has taken effect: a fault in the report of it must not undo that
            logger.exception("the status misses a change")
        states = {record.state for record in decision.tickets}
        moved = decision.run is not None
        if moved or decision.servers or TicketState.READY in states:  # a proof lets go of the groups that wait for it
            self.groups_came.notify()
        if moved or decision.servers or states & _FREES_ROOM or decision.evaluations:
            self.room_came.notify()
        if any(record.result is not None for record in decision.evaluations):
            self.evaluations_ended.notify()

    async def expire(self) -> None:
        """End tickets, leases and evaluations whose time is over. Their holders hear of it when they come back."""
        async with self.lock:
            over = evaluations.expire(self.ledger, self.fleet, self.now, self.clock.wall())
            decision = tickets.expire(self.ledger, self.now)
            await self.commit(msgspec.structs.replace(decision, evaluations=over))

    async def remove_drained(self) -> None:
        """Remove draining servers on which no worker has a request and whose last version the learner has verified, or
        whose time is over."""
        if (names := self._drained()) and self.failure is None:
            async with self.lock:
                await self.commit(servers.remove(self.fleet, self.ledger, [*self._drained()]))
            for name in names:
                logger.info("server %s is gone", name)

    def _drained(self) -> list[str]:
        draining = [record for record in self.fleet.records if record.server.state is ServerState.DRAINING]
        return [
            record.server.name
            for record in draining
            if self.clock.wall() - record.server.changed_at >= self.config.vllm.drain_timeout_s
            or not (self.observations.on_server(record.server.name, self.now) or self.to_be_judged(record))
        ]

    def to_be_judged(self, record: ServerRecord) -> bool:
        """Tell whether a newer version than the proven one may be on its way to a draining server."""
        newer = record.proven is not None and record.proven < self.ledger.run.version
        return record.awaits_verdict and newer and self.learner_lives

    def _drain_due(self) -> float:
        """Return when the first server's time to drain is over; infinity if none drains."""
        draining = [server.changed_at for server in self.fleet.servers if server.state is ServerState.DRAINING]
        left = [began + self.config.vllm.drain_timeout_s - self.clock.wall() for began in draining]
        return self.now + min(1.0, *left) if left else math.inf

    def grant(self) -> Grant:
        """Ask admission how many tickets may be issued now."""
        run = self.ledger.run
        if run.all_steps_made:
            return Grant(0, "the end of the run: the learner has made its last step")
        load = QueueLoad(
            self.ledger.outstanding, self.ledger.bytes, run.version, self.fleet.served_version, run.session
        )
        return self.admission.grant(load)

    @property
    def learner_lives(self) -> bool:
        """Whether the newest session's learner was heard from within a lease's time-out, and since the queue started.

        It renews its lease three times as often.
        """
        ago = self.observations.learner_seen_s_ago(self.now)
        return ago is not None and ago <= self.config.queue.lease_timeout_s

    def position(self) -> RunPosition:
        run = self.ledger.run
        return RunPosition(
            version=run.version,
            step=run.step,
            total_steps=run.total_steps,
            session=run.session,
            checkpoint_step=run.checkpoint_step,
            served_version=self.fleet.served_version,
            finished=run.finished,
            sessions=list(run.sessions),
            run=run.id,
        )

    def evaluation_views(self) -> list[Evaluation]:
        """Return every evaluation that is open or remembered, in the order of their requests."""
        return evaluations.views(self.ledger, self.fleet, self.clock.wall())

    async def _expire_when_due(self) -> None:
        while self.failure is None:
            due = min(self.ledger.next_deadline(self.now), self._drain_due())
            await asyncio.sleep(max(0.05, due - self.now))
            with suppress(Refusal):  # `on_failure` has told the service that the store failed
                await self.expire()
                await self.remove_drained()

    def _fail(self, message: str) -> None:
        if self.failure is None:
            self.failure = message
            self.close_waits()
            self.on_failure()
