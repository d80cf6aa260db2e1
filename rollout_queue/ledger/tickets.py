"""Decisions of the worker's side: issue, submit, give back, lapse. Pure: ledger in, decision out.

Every ticket that fails leads to its row being issued again under the next attempt, or to a drop with a reason (I1).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.messages import Group, Ticket
from rollout_queue.ledger.ledger import Ledger
from rollout_queue.ledger.records import Decision, TicketRecord, TicketState
from rollout_queue.ledger.refusal import Refusal

EXPIRED = "expired"


class GroupFacts(msgspec.Struct, frozen=True):
    """What the ledger keeps of a group that passed the door."""

    bytes: int
    tokens: int
    oldest_version: int
    newest_version: int
    servers: tuple[str, ...]

    @classmethod
    def of(cls, group: Group, size: int) -> GroupFacts:
        versions = group.versions()
        return cls(size, group.sampled_tokens, versions[0], versions[-1], tuple(sorted(set(group.server_names))))


def issue(ledger: Ledger, worker_id: str, count: int) -> Decision:
    """`count` tickets: rows that failed first, lowest first, then new rows."""
    version, serial = ledger.run.version, ledger.issued
    again = sorted(ledger.to_reissue)[:count]
    records = [
        TicketRecord(
            index=index,
            attempt=ledger.to_reissue[index].attempt + 1,
            serial=serial + position,
            worker_id=worker_id,
            version=version,
            failures=ledger.to_reissue[index].failures,
        )
        for position, index in enumerate(again)
    ]
    records += [
        TicketRecord(ledger.next_index + offset, 0, serial + len(again) + offset, worker_id, version)
        for offset in range(count - len(again))
    ]
    return Decision(tuple(records))


def ticket(ledger: Ledger, record: TicketRecord) -> Ticket:
    """The record as a worker sees it."""
    return Ticket(
        id=record.id,
        index=record.index,
        group_size=ledger.config.rollout.group_size,
        seed=ledger.config.run.seed,
        version=record.version,
        expires_in_s=ledger.config.queue.ticket_timeout_s,
    )


def submit(ledger: Ledger, record: TicketRecord, arrival: GroupFacts) -> Decision:
    """Accept a group that passed the door; raises a 429 `Refusal` while its bytes do not fit (I3)."""
    limit = ledger.config.queue.capacity_bytes
    if ledger.bytes + arrival.bytes > limit:
        raise Refusal(
            429,
            "full",
            f"{ledger.bytes} of {limit} bytes are taken and the group has {arrival.bytes}: wait for the learner, or "
            f"raise queue.capacity_bytes",
            retry_after_s=1.0,
        )
    accepted = record.to(
        TicketState.READY,
        arrival_version=ledger.run.version,
        **{f: getattr(arrival, f) for f in GroupFacts.__struct_fields__},
    )
    return Decision((accepted,))


def fail(ledger: Ledger, record: TicketRecord, reason: str, retryable: bool) -> Decision:
    """End an issued ticket that yielded no group."""
    return Decision((_failed(ledger, record, reason, retryable),))


def expire(ledger: Ledger, now: float) -> Decision:
    """End the tickets and return the groups whose holders were not heard of in time (F10)."""
    return Decision(
        tuple(
            _failed(ledger, record, EXPIRED, retryable=True)
            if record.state is TicketState.ISSUED
            else record.to(TicketState.READY, lease_id=None)
            for record in ledger.lapsed(now)
        )
    )


def drop(records: Iterable[TicketRecord], reason: str) -> tuple[TicketRecord, ...]:
    return tuple(record.to(TicketState.DROPPED, reason=reason, lease_id=None) for record in records)


def _failed(ledger: Ledger, record: TicketRecord, reason: str, retryable: bool) -> TicketRecord:
    failures = record.failures + 1
    again = retryable and failures < ledger.config.queue.ticket_attempts
    return record.to(TicketState.REISSUED if again else TicketState.DROPPED, reason=reason, failures=failures)
