"""What workers ask of the queue: tickets, heartbeats, handing in groups, giving tickets back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocol.messages import TicketFailure, TicketReply, TicketRequest, WorkerReply, WorkerReport
from rollout_queue.broker import Broker
from rollout_queue.ledger import tickets, validation
from rollout_queue.ledger.leases import RUN_FINISHED
from rollout_queue.ledger.records import TicketRecord, TicketState
from rollout_queue.ledger.refusal import Refusal
from rollout_queue.ledger.servers import UNVERIFIED_SERVER
from rollout_queue.ledger.tickets import GroupFacts
from rollout_queue.wakeup import wait

MAX_WAIT_S = 60.0
_REASON_CHARACTERS = 80  # a reason becomes a label of the metrics


class WorkerDesk:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def tickets(self, request: TicketRequest, gone: Callable[[], Awaitable[bool]]) -> TicketReply:
        """Tickets as soon as admission has any, else none after the wait. `gone`: whether the asker hung up.

        Raises a 409 `Refusal` when the run is finished.
        """
        broker = self._broker
        if request.max_tickets < 1:
            raise Refusal(422, "max_tickets", f"max_tickets = {request.max_tickets}: ask for at least 1")
        undelivered = self._undelivered(request)
        if undelivered:
            return TicketReply([tickets.ticket(broker.ledger, r) for r in undelivered], broker.fleet.servers)
        deadline = broker.now + min(request.wait_s, MAX_WAIT_S)
        while True:
            changed = broker.room_came.listen()
            broker.observations.worker_seen(request.worker_id, broker.now)
            records = await self._issue(request, gone)
            if records:
                broker.observations.waits.end(request.worker_id)
                return TicketReply([tickets.ticket(broker.ledger, r) for r in records], broker.fleet.servers)
            grant = broker.grant()
            broker.admission.observe_refusal(grant)
            why = grant.blocked_by or "a ticket"
            broker.observations.waits.begin(request.worker_id, why, broker.now, until=broker.now + 2 * MAX_WAIT_S)
            if broker.closing or not await wait(changed, deadline - broker.now):
                return TicketReply([], [])

    async def heartbeat(self, report: WorkerReport) -> WorkerReply:
        """Renew a worker's tickets and tell it which of them it has lost."""
        broker = self._broker
        broker.observations.worker_reports(report, broker.now)
        lost = []
        for ticket_id in report.ticket_ids:
            record = broker.ledger.get(ticket_id)
            if record is None or (record.state is TicketState.ISSUED and record.worker_id != report.worker_id):
                lost.append(ticket_id)
            else:
                broker.ledger.renew_ticket(ticket_id, broker.now)
        return WorkerReply(lost, broker.fleet.servers, broker.ledger.run.finished)

    async def fail(self, ticket_id: str, failure: TicketFailure) -> None:
        """Take a ticket back. One that has ended already needs nothing more: the call may be a repeat."""
        broker = self._broker
        async with broker.lock:
            record = broker.ledger.get(ticket_id)
            if record is not None and record.state is TicketState.ISSUED and record.worker_id == failure.worker_id:
                reason = f"failed:{failure.reason}"[:_REASON_CHARACTERS]
                await broker.commit(tickets.fail(broker.ledger, record, reason, failure.retryable))

    async def submit(self, ticket_id: str, body: bytes) -> bool:
        """Take in a group; false if it was here before.

        Raises `Refusal`s: 410 the ticket has ended without a group, 422 a rule of the door, 429 no room now.
        """
        broker = self._broker
        record = broker.ledger.get(ticket_id)
        if record is None or record.state is not TicketState.ISSUED:
            return await self._settled(ticket_id)
        try:
            arrival = await asyncio.to_thread(self._open, record, body)
            async with broker.lock:
                record = broker.ledger.get(ticket_id)
                if record is not None and record.state is TicketState.ISSUED:
                    self._check_servers(record, arrival)
                    await self._accept(record, arrival, body)
                    return True
        except validation.Rejection as rejection:
            raise await self.reject(ticket_id, 422, rejection.reason, str(rejection)) from rejection
        return await self._settled(ticket_id)

    async def reject(self, ticket_id: str, status: int, reason: str, message: str) -> Refusal:
        """Count a rejected group and end its ticket, so that no permit leaks (F15); the `Refusal` to raise."""
        broker = self._broker
        broker.observations.rejections[reason] += 1
        async with broker.lock:
            record = broker.ledger.get(ticket_id)
            if record is not None and record.state is TicketState.ISSUED:
                await broker.commit(tickets.fail(broker.ledger, record, f"rejected:{reason}", retryable=True))
        return Refusal(status, reason, message)

    def _undelivered(self, request: TicketRequest) -> list[TicketRecord]:
        """Tickets of the asker that it does not have, given their full time again."""
        broker = self._broker
        if request.have is None:
            return []
        have = set(request.have)
        records = [
            record
            for record in broker.ledger.tickets(TicketState.ISSUED)
            if record.worker_id == request.worker_id and record.id not in have
        ][: request.max_tickets]
        for record in records:
            broker.ledger.renew_ticket(record.id, broker.now)
        return records

    async def _issue(
        self, request: TicketRequest, gone: Callable[[], Awaitable[bool]]
    ) -> tuple[TicketRecord, ...] | None:
        broker = self._broker
        if broker.grant().count == 0 and not broker.ledger.run.finished:
            return None
        async with broker.lock:
            if broker.ledger.run.finished:
                raise Refusal(409, RUN_FINISHED, "the run is finished: no more tickets are given")
            count = min(request.max_tickets, broker.grant().count)
            if count == 0 or broker.closing or await gone():
                return None
            decision = tickets.issue(broker.ledger, request.worker_id, count)
            await broker.commit(decision)
            return decision.tickets

    def _open(self, record: TicketRecord, body: bytes) -> GroupFacts:
        group = validation.decode(body)
        validation.check(group, record, self._broker.config.rollout.group_size, self._broker.ledger.run.version)
        return GroupFacts.of(group, len(body))

    def _check_servers(self, record: TicketRecord, arrival: GroupFacts) -> None:
        server = self._broker.fleet.unverified(arrival.servers, arrival.newest_version, record.serial)
        if server is not None:
            raise validation.Rejection(
                UNVERIFIED_SERVER, f"server {server} sampled some of its tokens with weights that failed their proof"
            )

    async def _accept(self, record: TicketRecord, arrival: GroupFacts, body: bytes) -> None:
        broker = self._broker
        try:
            decision = tickets.submit(broker.ledger, record, arrival)
        except Refusal as refusal:
            broker.observations.rejections[refusal.reason] += 1
            # The group is here, its bytes are not: its worker is alive and will come again.
            broker.ledger.renew_ticket(record.id, broker.now)
            raise
        await broker.commit(decision, {record.id: body})
        broker.observations.rates.add(broker.now, groups=1, tokens_sampled=arrival.tokens)
        broker.observations.progress_at = broker.now

    async def _settled(self, ticket_id: str) -> bool:
        """Answer for a ticket that is not out: false if its group was accepted; raises a 410 `Refusal`."""
        broker = self._broker
        record = broker.ledger.get(ticket_id) or (await broker.call(broker.store.records, [ticket_id])).get(ticket_id)
        if record is not None and record.was_accepted:
            return False
        if record is None:
            broker.observations.rejections["ticket_unknown"] += 1
            raise Refusal(410, "ticket_unknown", f"ticket {ticket_id} was never issued in this run")
        broker.observations.rejections["ticket_ended"] += 1
        raise Refusal(410, "ticket_ended", f"ticket {ticket_id} was {record.state}: {record.reason}")
