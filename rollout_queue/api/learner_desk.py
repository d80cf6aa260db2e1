"""What the learner asks of the queue: sessions, leases, acknowledgements, checkpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from protocol.messages import BeginSession, Checkpointed, LeaseAck, LeaseReply, LeaseRequest, RunPosition, Waiting
from rollout_queue.api.worker_desk import MAX_WAIT_S
from rollout_queue.broker import Broker
from rollout_queue.ledger import leases
from rollout_queue.ledger.admission import StepFacts
from rollout_queue.ledger.records import Decision, RunState, TicketRecord, TicketState
from rollout_queue.ledger.refusal import Refusal
from rollout_queue.observe.ages import OVER_AGE
from rollout_queue.observe.observations import FEEDER, LEARNER
from rollout_queue.wakeup import wait


class LearnerDesk:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._dropped_for_age = 0

    async def begin(self, message: BeginSession) -> RunPosition:
        """Start a session; the one before loses its leases and is refused from now on."""
        broker = self._broker
        async with broker.lock:
            forgotten = await broker.call(broker.store.forgotten_after, message.step)
            await broker.commit(leases.begin(broker.ledger, message, forgotten if message.resume else []))
        self._heard()
        broker.observations.progress_at = broker.now
        broker.observations.waits.end(LEARNER)
        return broker.policy()

    async def checkpointed(self, message: Checkpointed) -> RunPosition:
        broker = self._broker
        async with broker.lock:
            self._fence(message.session)
            await broker.commit(leases.checkpointed(broker.ledger, message.step))
        return broker.policy()

    async def waiting(self, message: Waiting) -> RunPosition:
        broker = self._broker
        self._fence(message.session)
        if message.what is None:
            broker.observations.waits.end(LEARNER)
        else:
            broker.observations.waits.begin(LEARNER, message.what, broker.now)
        return broker.policy()

    async def lease(self, request: LeaseRequest, gone: Callable[[], Awaitable[bool]]) -> LeaseReply:
        """Groups as soon as there are any, else none after the wait. `gone`: whether the asker hung up."""
        broker = self._broker
        deadline = broker.now + min(request.wait_s, MAX_WAIT_S)
        while True:
            came = broker.groups_came.listen()
            async with broker.lock:
                self._fence(request.session)
                records = await self._take(request, gone)
                if records:
                    broker.observations.waits.end(FEEDER)
                    return await self._deliver(request.lease_id, records)
            broker.observations.waits.begin(FEEDER, "groups", broker.now, until=broker.now + 2 * MAX_WAIT_S)
            if broker.closing or not await wait(came, deadline - broker.now):
                return self._reply(request.lease_id, [], {})

    async def ack(self, lease_id: str, message: LeaseAck) -> RunPosition:
        """End groups as trained or dropped; with a new step the policy's version goes up.

        `lease_id` is renewed; the groups may be of any of this session's leases.
        """
        broker = self._broker
        async with broker.lock:
            self._fence(message.session)
            named = [*message.trained, *message.dropped]
            ended = await broker.call(
                broker.store.records, [ticket_id for ticket_id in named if broker.ledger.get(ticket_id) is None]
            )
            before = broker.ledger.run
            decision = leases.ack(broker.ledger, message, ended)
            await broker.commit(decision)
            broker.ledger.renew_lease(lease_id, broker.now)
            self._observe(before, message, decision)
        return broker.policy()

    async def renew(self, lease_id: str, session: int) -> None:
        """Raises a 409 `Refusal` if the lease lapsed: its groups may be leased anew."""
        broker = self._broker
        self._fence(session)
        if lease_id in broker.ledger.lapsed_leases:
            raise Refusal(
                409,
                "lease_lapsed",
                f"lease {lease_id} was not renewed for queue.lease_timeout_s = "
                f"{broker.config.queue.lease_timeout_s:.0f} s and its groups went back: drop what is left of it",
            )
        broker.ledger.renew_lease(lease_id, broker.now)

    async def release(self, lease_id: str, session: int) -> None:
        broker = self._broker
        async with broker.lock:
            self._fence(session)
            await broker.commit(leases.release(broker.ledger, lease_id))

    async def finish(self) -> RunPosition:
        broker = self._broker
        async with broker.lock:
            await broker.commit(leases.finish(broker.ledger))
        broker.observations.waits.end(LEARNER)
        return broker.policy()

    def _fence(self, session: int) -> None:
        leases.check_session(self._broker.ledger, session)
        self._heard()

    def _heard(self) -> None:
        self._broker.observations.learner_seen(self._broker.now)

    async def _take(self, request: LeaseRequest, gone: Callable[[], Awaitable[bool]]) -> list[TicketRecord]:
        """Groups of this lease whose delivery was lost, else new ones."""
        broker = self._broker
        have = set(request.have)
        undelivered = [record for record in broker.ledger.leased(request.lease_id) if record.id not in have]
        broker.ledger.renew_lease(request.lease_id, broker.now)
        if undelivered or request.max_groups < 1:
            return undelivered
        if not broker.ledger.count(TicketState.READY) or broker.closing or await gone():
            return []
        decision = leases.lease(broker.ledger, request.lease_id, request.max_groups)
        await broker.commit(decision)
        # The same name is a lease again; what its former self held must not be renewed by mistake.
        broker.ledger.lapsed_leases.discard(request.lease_id)
        return list(decision.tickets)

    async def _deliver(self, lease_id: str, records: list[TicketRecord]) -> LeaseReply:
        payloads = await self._broker.call(self._broker.store.payloads, [record.id for record in records])
        return self._reply(lease_id, records, payloads)

    def _reply(self, lease_id: str, records: list[TicketRecord], payloads: dict[str, bytes]) -> LeaseReply:
        return LeaseReply(
            lease_id=lease_id,
            groups=[msgspec.Raw(payloads[record.id]) for record in records],
            version_at_arrival=[record.arrival_version for record in records],
            expires_in_s=self._broker.config.queue.lease_timeout_s,
        )

    def _observe(self, before: RunState, message: LeaseAck, decision: Decision) -> None:
        """Feed an ack's figures to status and admission."""
        broker, report = self._broker, message.report
        trained = [record for record in decision.tickets if record.state is TicketState.TRAINED]
        self._dropped_for_age += sum(record.reason == OVER_AGE for record in decision.tickets)
        stepped = broker.ledger.run.version > before.version
        if not stepped and not trained:
            return
        broker.observations.staleness.add_step(trained, report.staleness_max if report else None)
        if not stepped:
            return
        broker.observations.progress_at = broker.now
        broker.observations.rates.add(broker.now, steps=1, tokens_trained=report.tokens_trained if report else 0)
        wait_share = report.wait_s / report.step_s if report and report.step_s > 0 else 0.0
        broker.admission.observe_step(StepFacts(len(trained), self._dropped_for_age, wait_share))
        self._dropped_for_age = 0
        # The depth may have grown after the commit woke the workers.
        broker.room_came.notify()
        if report is not None:
            broker.observations.learner_reports(report)
