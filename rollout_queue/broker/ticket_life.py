"""Answers `GET /v1/tickets/{id}`: what became of a ticket, and of the others of its row."""

from __future__ import annotations

import re

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.rollouts import TicketLife
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.ledger.records import EVAL_TICKET, Refusal, TicketRecord

# Attempts at the row that are looked for, before the ticket's and after it.
_MAX_ATTEMPTS = 16

# No store is asked for what cannot be an id.
_ID = re.compile(rf"(?P<row>({EVAL_TICKET}[0-9]{{1,9}}\.)?[0-9]{{1,18}})\.(?P<attempt>[0-9]{{1,9}})")


async def read(broker: Broker, ticket_id: str) -> list[TicketLife]:
    """Return the lives of a ticket and of the other attempts at its row, oldest first.

    Raises:
        Refusal: TICKET_UNKNOWN.
    """
    if (asked := _ID.fullmatch(ticket_id)) is not None:
        attempt = int(asked["attempt"])
        around = range(max(0, attempt - _MAX_ATTEMPTS), attempt + _MAX_ATTEMPTS)
        names = [f"{asked['row']}.{number}" for number in around]
        stored = await broker.writer.read(broker.store.records, names)
        records = [broker.ledger.get(name) or stored.get(name) for name in names]
        lives = [_life(broker, record) for record in records if record is not None]
        if any(life.id == ticket_id for life in lives):
            return lives
    raise Refusal(
        reasons.TICKET_UNKNOWN,
        f"ticket {ticket_id[:80]!r} is not known: this run never issued it, it was an evaluation's that is over, or so "
        f"long ago that only sums are kept",
    )


def _life(broker: Broker, record: TicketRecord) -> TicketLife:
    times, began = broker.observations.tickets.times(record.id), broker.clock.wall() - broker.now
    group = record.group
    life = TicketLife(
        id=record.id,
        state=record.state,
        worker_id=record.worker_id,
        version=record.version,
        failures=record.failures,
        step=record.step,
        trained_version=record.trained_version,
        reason=record.reason,
        **{f"{name}_at": at and began + at for name, at in msgspec.structs.asdict(times).items()},
    )
    if record.was_accepted:
        life.arrival_version, life.tokens, life.bytes = record.arrival_version, group.tokens, group.bytes
        life.sampled_by = [(sampled.server, sampled.oldest, sampled.newest) for sampled in group.servers]
    return life
