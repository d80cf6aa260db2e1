"""The queue without HTTP: ledger, servers and admission in memory, kept in step with the store.

Every change goes one way: decide, apply to memory, and answer once the store has it. Between a decision and its
application nothing else happens, so decisions need no lock, save those that read the store first. Once a commit fails
the broker answers nothing more, so that nobody is told what the store has not.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Mapping

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.history import FOLDER
from slipstream.protocol.messages import RunPosition
from slipstream.protocol.rollouts import FILE_NAME as ROLLOUTS
from slipstream.protocol.rollouts import TrainedRollouts
from slipstream.protocol.status import Evaluation
from slipstream.protocol.trained_record import RECORD_FOLDER
from slipstream.rollout_queue.broker.clock import Clock
from slipstream.rollout_queue.broker.payload_cache import PayloadCache
from slipstream.rollout_queue.broker.recorder import Recorder, heads
from slipstream.rollout_queue.broker.ticket_spans import TicketSpans
from slipstream.rollout_queue.broker.viewers import Viewers
from slipstream.rollout_queue.broker.waiting import TicketLine, WakeUp
from slipstream.rollout_queue.broker.writer import Commit, Writer
from slipstream.rollout_queue.ledger import evaluations, servers, tickets
from slipstream.rollout_queue.ledger.admission import Admission, Grant, QueueLoad
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import Decision, Refusal, StoreContents, TicketState
from slipstream.rollout_queue.ledger.registration import WorkerRegistry
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_queue.observe.early_failure import EarlyFailureCheck
from slipstream.rollout_queue.observe.history import History
from slipstream.rollout_queue.observe.observations import Observations
from slipstream.rollout_queue.store.base import MAX_SILENCE_S, Store, StoreError
from slipstream.rollout_queue.store.changes import Payload

logger = logging.getLogger(__name__)


class Broker:
    """Holds the queue's state and commits its changes. Use it within `lifecycle.running`.

    Attributes:
        lock: Held from a look at the ledger until its decision is applied, by those that read the store in between;
            everyone else waits for it, and holds it over no wait.
        judging: Held while a large group is validated: one at a time, since several threads of Python would keep the
            loop waiting.
        active_url: URL of the queue that is active while this one stands by; None if this one is.
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
        self.active_url: str | None = None
        self.failure: StoreError | ConfigError | None = None
        self._start = secrets.token_hex(4)
        self.lock = asyncio.Lock()
        self.judging = asyncio.Lock()
        self.groups_came = WakeUp()
        self.evaluations_ended = WakeUp()
        self.line = TicketLine(lambda: self.grant().count)
        self.recent_payloads = PayloadCache()
        self.admission = Admission(config)
        self.fleet = ServerRegistry()
        self.ledger = Ledger(config, StoreContents(), self.now)
        self.registry = WorkerRegistry(config.queue.max_workers)
        self.early_failures = EarlyFailureCheck(config)
        self.observations = Observations(
            self.now,
            config.learner.groups_per_step,
            config.vllm.start_timeout_s,
            config.queue.max_workers,
        )
        record = config.run_dir / RECORD_FOLDER
        self.recorder = Recorder(record, config.queue.record_bytes) if config.queue.record else None
        self.history = History(config.run_dir / FOLDER if config.run_dir.is_dir() else None)
        self.trained = TrainedRollouts(config.run_dir / ROLLOUTS)
        self.viewers = Viewers()
        self.spans = TicketSpans()
        self.on_failure: Callable[[], None] = lambda: None
        self.writer = Writer(store, self.fail, self.observations.histograms.commit_s)

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def log_finished(self) -> None:
        """Say why a queue outlives its run."""
        logger.info(
            "the run has finished. This queue stays up for its status and its rollouts: end it with Ctrl-C or SIGTERM "
            "(slipstream up ends the one that it started)"
        )

    def close_waits(self) -> None:
        """Answer all long-polls with nothing, since the service is about to stop."""
        self.closing = True
        self.viewers.end()
        self.wake_all()

    def wake_all(self) -> None:
        """Let everyone who waits look again."""
        self.groups_came.notify()
        self.evaluations_ended.notify()
        self.line.call_if(lambda _: True)

    def check_ready(self) -> None:
        """Refuse all requests while the store has failed (STORE_FAILED), is another queue's (STANDS_BY), or is not
        loaded (NOT_READY)."""
        if self.ready and self.failure is None:
            return
        if self.failure is not None:
            raise Refusal(reasons.STORE_FAILED, str(self.failure))
        if self.active_url is not None:
            raise Refusal(reasons.STANDS_BY, f"this queue stands by: the active one is at {self.active_url}", 1.0)
        raise Refusal(reasons.NOT_READY, "the queue is loading its store: try again in a moment", 1.0)

    def check_answers_soon(self) -> None:
        """Refuse (NOT_READY) while the store is silent, and answers wait for it: another queue may take over from this
        one, or has done so."""
        if self.store.has_standbys and self.writer.silent_s > MAX_SILENCE_S:
            raise Refusal(
                reasons.NOT_READY,
                f"the store has not answered for {self.writer.silent_s:.0f} s, and another queue may be active by now: "
                f"try again in a moment",
                1.0,
            )

    async def record(self, lease: str, decision: Decision) -> None:
        """Write the groups that an acknowledgement trains into the run's record. Call it before the commit."""
        recorder = self.recorder
        found = heads(lease, decision.tickets, self.ledger.run) if recorder is not None else []
        if recorder is None or not found:
            return

        def payload(ticket_id: str) -> bytes | None:
            found = self.store.payloads([ticket_id]).get(ticket_id)
            return found.sound_body if found is not None else None

        if (failure := await self.writer.read(recorder.append, found, payload)) is not None:
            logger.error("%s", failure)
            self.observations.notices.say("record", failure, self.now)

    def apply(self, decision: Decision, payloads: Mapping[str, bytes] | None = None) -> Commit:
        """Carry out a decision and the ends of evaluations that follow from it: in memory now, in the store soon.

        Nothing may happen between the decision and this call.

        Args:
            payloads: Bodies of new groups, by ticket id.

        Returns:
            What to await before anyone is told of the decision, or of what memory shows where it is empty: it raises
            `Refusal` (STORE_FAILED) if the store fails.

        Raises:
            Refusal: STORE_FAILED, NOT_READY, or OUT_OF_RANGE for a number that no store can hold.
        """
        self.check_ready()
        if not decision:
            return self.writer.newest
        decision = evaluations.with_ends(self.ledger, self.fleet, decision, self.clock.wall())
        tickets.check_range(decision)
        session, had_tickets = self.ledger.run.session, self._evaluations_with_tickets()
        commit = self.writer.add(decision, {name: Payload.of(body) for name, body in (payloads or {}).items()})
        try:
            self.recent_payloads.evict_ended(decision.tickets)
            for name, body in (payloads or {}).items():
                self.recent_payloads.add(name, body)
            self.ledger.apply(decision, self.now)
            for server in decision.servers:
                self.fleet.apply(server)
        except Exception as error:
            raise self.writer.fail(error) from error
        try:
            self.observations.decided(decision, self.now)
            self.spans.moved(self.ledger.run.id, decision.tickets, self.clock.wall())
            if decision.run is not None or decision.servers:
                version = self.ledger.run.version
                published = version - version % self.config.weight_sync.every
                self.observations.limits.versions(published, self.fleet.served_version, self.now)
        except Exception:  # the change has taken effect: a fault in the report of it must not undo that
            logger.exception("the status misses a change")
        self._wake(decision, session, had_tickets)
        return commit

    def _wake(self, decision: Decision, session: int, had_tickets: frozenset[int]) -> None:
        """Wake those who wait for what a decision changed.

        Args:
            session: The session before it.
            had_tickets: Evaluations that had tickets to issue before it.
        """
        ready = any(record.state is TicketState.READY for record in decision.tickets)
        if ready or decision.run is not None or decision.servers:  # a proof lets go of the groups that wait for it
            self.groups_came.notify()
        if any(record.result is not None for record in decision.evaluations):
            self.evaluations_ended.notify()
        if not self.line:
            return
        run = decision.run
        # A new session admits its workers again; after the last step a worker may hold more of evaluations.
        anew = run is not None and (run.finished or run.all_steps_made or run.session != session)
        if anew or self._evaluations_with_tickets() - had_tickets:
            self.line.call_if(lambda _: True)
        elif decision.servers:
            self.line.call_if(lambda place: not self.fleet.all_serve(place.serving))
        if self.ledger.evaluations.open:
            # What a worker may hold of evaluations is bounded, so a ticket that ended makes room for its worker's next.
            workers = {record.worker_id for record in decision.tickets if record.evaluation is not None}
            self.line.call_if(lambda place: place.worker_id in workers)
        self.line.call_next()

    def _evaluations_with_tickets(self) -> frozenset[int]:
        """Return the numbers of the evaluations of which tickets can be issued now."""
        if not self.line:
            return frozenset()
        return evaluations.with_tickets(self.ledger, self.fleet.served_version)

    async def expire(self) -> None:
        """End tickets, leases and evaluations whose time is over. Their holders hear of it when they come back."""
        async with self.lock:
            over = evaluations.expire(self.ledger, self.fleet, self.now, self.clock.wall())
            decision = tickets.expire(self.ledger, self.now)
            commit = self.apply(msgspec.structs.replace(decision, evaluations=over))
        await commit

    async def remove_drained(self) -> None:
        """Remove draining servers on which no worker has a request and whose last version the learner has verified, or
        whose time is over."""
        if self.failure is not None or not self._drained():
            return
        async with self.lock:
            names = self._drained()
            commit = self.apply(servers.remove(self.fleet, self.ledger, names))
        await commit
        for name in names:
            logger.info("server %s is gone", name)

    def _drained(self) -> list[str]:
        workers = self.observations.workers
        return [
            name
            for name in self.ledger.drains
            if self.ledger.drains.is_over(name, self.now)
            or not (workers.count_on_server(name, self.now) or self.to_be_judged(name))
        ]

    def to_be_judged(self, server: str) -> bool:
        """Tell whether a newer version than the proven one may be on its way to a draining server."""
        if (record := self.fleet.record(server)) is None:
            return False
        newer = record.proven is not None and record.proven < self.ledger.run.version
        return record.awaits_verdict and newer and self.learner_lives

    def drain_due(self) -> float:
        """Return when the first server's time to drain is over; infinity if none drains."""
        return min(self.now + 1.0, self.ledger.drains.soonest()) if self.ledger.drains else math.inf

    def grant(self) -> Grant:
        """Ask admission how many tickets may be issued now."""
        run = self.ledger.run
        if run.all_steps_made:
            return Grant(0, "the end of the run: the learner has made its last step")
        if self.ledger.rows is not None and not self.ledger.rows.is_ready:
            return Grant(0, 'the data set: no worker has named its rows, which task.order = "learnable" needs')
        load = QueueLoad(
            self.ledger.outstanding, self.ledger.bytes, run.version, self.fleet.served_version, run.session
        )
        return self.admission.grant(load)

    @property
    def fleet_state(self) -> str:
        """Names the state of the fleet: another after each change, and for each start of a queue."""
        return f"{self._start}.{self.fleet.revision}"

    @property
    def learner_lives(self) -> bool:
        """Whether the newest session's learner was heard from within a lease's time-out, and since the queue started.

        It renews its lease three times as often.
        """
        ago = self.observations.learner_seen_s_ago(self.now)
        return ago is not None and ago <= self.config.queue.lease_timeout_s

    def position(self) -> RunPosition:
        run, seen_s_ago = self.ledger.run, self.observations.learner_seen_s_ago(self.now)
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
            learner=run.learner and msgspec.structs.replace(run.learner, seen_s_ago=seen_s_ago),
        )

    def evaluation_views(self) -> list[Evaluation]:
        """Return every evaluation that is open or remembered, in the order of their requests."""
        return evaluations.views(self.ledger, self.fleet, self.clock.wall())

    def fail(self, error: StoreError | ConfigError) -> None:
        """Answer nothing more, and tell the service why."""
        self.failure = error
        self.close_waits()
        self.on_failure()
