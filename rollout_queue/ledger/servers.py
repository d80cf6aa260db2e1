"""Decisions on servers and what follows for tickets (I5). Pure: registry and ledger in, decision out.

- Groups with tokens of weights that failed their proof are rejected when they are submitted, dropped while they wait,
  and taken back from the learner while it has not trained them. So are groups whose proof can no longer come, since
  their server left service first. Rows of evaluations that such weights sampled are issued again.
- Versions that a dead learner left unproven are distrusted by the next one.
- A server that leaves the fleet drains: it takes no new episode, and is removed when no worker has a request on it and
  the learner has verified the version that was on its way. Its distrust outlives it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_queue.ledger import tickets
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import Decision, Distrust, Refusal, ServerRecord, TicketRecord, TicketState
from slipstream.rollout_queue.ledger.server_registry import AWAITS_PROOF, ServerRegistry, awaits_proof, distrusts, lost

# Entries of distrust of one server, beyond which old ones are forgotten.
_MAX_DISTRUST = 32


def put(fleet: ServerRegistry, ledger: Ledger, wanted: Server, wall_time: float) -> Decision:
    """Register a server or change its state.

    A failed proof drops the ready groups that it taints, the end of its service those that were never proven (I5). The
    learner hears of leased ones before it trains them (`leases.revoked`).
    """
    record = fleet.decide(wanted, wall_time, ledger.issued)
    if record is None:
        return Decision()
    before = fleet.get(wanted.name)
    if before is not None and before.state in AWAITS_PROOF and wanted.state is ServerState.JOINING:
        record = _left_unproven(record, ledger.run.version + 1)  # its old process may have swapped in more
    known = fleet.record(wanted.name)
    decision = _changed(ledger, known, _tidied(record, ledger))
    if _times_at(record, ledger.issued) > (0 if known is None else _times_at(known, ledger.issued)):
        decision = msgspec.structs.replace(decision, tickets=(*decision.tickets, *_issued_before(ledger)))
    return decision


def drain(fleet: ServerRegistry, ledger: Ledger, name: str, wall_time: float) -> Decision:
    """Let a server leave: it takes no new episode from now on."""
    record = fleet.leave(name, wall_time)
    return Decision() if record is None else _changed(ledger, fleet.record(name), record)


def remove(fleet: ServerRegistry, ledger: Ledger, names: Iterable[str]) -> Decision:
    """Remove servers that have drained, or shall go at once."""
    records = [record for name in names if (record := fleet.gone(name)) is not None]
    changes = [_changed(ledger, fleet.record(record.server.name), record) for record in records]
    changed = {ticket.id: ticket for change in changes for ticket in change.tickets}
    return Decision(tuple(changed.values()), servers=tuple(records))


def distrust_unproven(fleet: ServerRegistry, ledger: Ledger, version: int) -> Decision:
    """Distrust what the session before left unproven, as a session begins at `version` (I5).

    The groups concerned are dropped when they would be leased, and rows of evaluations are issued again.
    """
    records: list[ServerRecord] = []
    again: dict[str, TicketRecord] = {}
    for known in fleet.records:
        if known.proven is not None and known.proven + 1 < version:
            records.append(record := _left_unproven(known, version))
            again |= {ticket.id: ticket for ticket in _evaluated_again(ledger, record, known.proven + 1)}
    return Decision(tuple(again.values()), servers=tuple(records))


def _times_at(record: ServerRecord, serial: int) -> int:
    """Count what the record says of tickets before, or since, this serial."""
    return sum(distrust.until_serial == serial for distrust in record.distrust) + (record.restarted_at == serial)


def _issued_before(ledger: Ledger) -> list[TicketRecord]:
    """Return the tickets of evaluations that are out, with serials that tell that they were issued before this moment.

    A ticket of an evaluation has the serial of the training ticket that follows, which may be issued much later.
    """
    out = ledger.evaluations.tickets(TicketState.ISSUED)
    return [
        msgspec.structs.replace(ticket, serial=ticket.serial - 1) for ticket in out if ticket.serial == ledger.issued
    ]


def _changed(ledger: Ledger, known: ServerRecord | None, record: ServerRecord) -> Decision:
    """Change a record, drop the ready groups that can no longer be trained because of it, and evaluate rows again that
    it sampled.

    Args:
        known: The record before.
    """
    oldest = _oldest_tainted(known, record)
    if oldest is None:
        return Decision(servers=(record,))
    tainted = [ticket for ticket in ledger.ready.sampled_by(record.server.name, oldest) if _taints(record, ticket)]
    dropped = tickets.drop(tainted, reasons.UNVERIFIED_SERVER)
    return Decision((*dropped, *_evaluated_again(ledger, record, oldest)), servers=(record,))


def _oldest_tainted(known: ServerRecord | None, record: ServerRecord) -> int | None:
    """Return the oldest version whose tokens can no longer be trained because of a change; None if there is none.

    Groups that come later are refused, and those that come back from the learner are dropped before they are leased.
    """
    before = () if known is None else known.distrust
    versions = [new.version for new in record.distrust if not any(old == new or _covers(old, new) for old in before)]
    if not awaits_proof(record) and (known is None or awaits_proof(known)):
        versions.append(0 if record.proven is None else record.proven + 1)
    return min(versions, default=None)


def _covers(old: Distrust, new: Distrust) -> bool:
    """Tell whether a distrust forbids all that another one does."""
    limits = ((old.until_serial, new.until_serial), (old.until_version, new.until_version))
    return old.version <= new.version and all(
        before is None or (after is not None and after <= before) for before, after in limits
    )


def _evaluated_again(ledger: Ledger, record: ServerRecord, oldest: int) -> list[TicketRecord]:
    """Return the evaluated tickets whose weights, of version `oldest` or newer, failed their proof or left service
    before it, to be issued again."""
    return [
        ticket.to(TicketState.REISSUED, reason=reasons.UNVERIFIED_SERVER, result=None)
        for ticket in ledger.evaluations.sampled_by(record.server.name, oldest)
        if _taints(record, ticket)
    ]


def _taints(record: ServerRecord, ticket: TicketRecord) -> bool:
    """Tell whether tokens of a group are from weights of this server that failed their proof, or left service before
    it."""
    own = (sampled for sampled in ticket.group.servers if sampled.server == record.server.name)
    return any(distrusts(record, sampled, ticket.serial) for sampled in own) or lost(record, ticket.group)


def _left_unproven(record: ServerRecord, below: int) -> ServerRecord:
    """Distrust the versions above the proven one and below `below`: they may have been swapped in, unproven."""
    if record.proven is None or record.proven + 1 >= below:
        return record
    first, open_ones = record.proven + 1, [d for d in record.distrust if d.until_serial is None]
    if any(d.version <= first and (d.until_version is None or d.until_version >= below) for d in open_ones):
        return record
    # An open distrust with the same beginning is replaced, so that sessions which prove nothing do not add to it.
    kept = tuple(d for d in record.distrust if d not in open_ones or d.until_version is None or d.version != first)
    return msgspec.structs.replace(record, distrust=(*kept, Distrust(first, None, below)))


def _tidied(record: ServerRecord, ledger: Ledger) -> ServerRecord:
    """Forget distrust that concerns no live ticket any more, once there are many entries."""
    if len(record.distrust) <= _MAX_DISTRUST:
        return record
    oldest = ledger.oldest_serial()
    kept = tuple(d for d in record.distrust if d.until_serial is None or d.until_serial > oldest)
    return msgspec.structs.replace(record, distrust=kept)


def check_unfenced(fleet: ServerRegistry, server: Server) -> None:
    """Check a change that comes without the learner's session.

    Raises:
        Refusal: SESSION_SUPERSEDED for what only the newest learner may say; SERVER_MISMATCH for an address that is
            registered under another name, or that differs from a serving server's.
    """
    if server.state not in (ServerState.JOINING, ServerState.DOWN):
        raise Refusal(
            reasons.SESSION_SUPERSEDED,
            f"server {server.name!r} cannot become {server.state} without the learner's session: others may only "
            f"register it as joining, or report it as down",
        )
    twin = next((other for other in fleet.servers if other.url == server.url and other.name != server.name), None)
    if twin is not None and server.state is ServerState.JOINING:
        raise Refusal(
            reasons.SERVER_MISMATCH,
            f"the server at {server.url[:200]!r} is registered already, as {twin.name!r}: one name is enough",
        )
    known = fleet.get(server.name)
    if known is not None and known.state is ServerState.SERVING and known.url != server.url:
        raise Refusal(
            reasons.SERVER_MISMATCH,
            f"server {server.name!r} serves at {known.url}, not at {server.url[:200]!r}: name another server, or "
            f"report that one as down first",
        )
