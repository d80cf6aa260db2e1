"""The vLLM servers and their states: only one whose weights were proven serves episodes (I5).

A server that starts or restarts is `joining`, whatever it was before. Once a version fails its proof, what the server
samples under that version or a newer one is distrusted until the server is proven again, and that part of it still
afterwards: groups with such tokens are rejected at the door, dropped where they wait, and taken back from the learner
where it has leased but not yet trained them. What a server sampled before it became unreachable stays good; of one
that joined again, tickets issued from then on take nothing until it is proven.

Between a swap and its proof a server samples tokens that nobody vouches for yet: their groups wait in the queue until
the proof holds. Where it fails, or the server leaves service before it came, they are dropped; and what a learner left
without a proof when it died is distrusted by the next session. A server that leaves the fleet drains: it takes no new
episode, and is gone when no worker has a request on it and the learner has said what came of the version that was on
its way. Its distrust outlives it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol import reasons
from protocol.messages import Server, ServerState
from rollout_queue.ledger import tickets
from rollout_queue.ledger.fleet import ALLOWED, AWAITS_PROOF, Fleet, lost
from rollout_queue.ledger.ledger import Ledger
from rollout_queue.ledger.records import Decision, Distrust, ServerRecord, TicketState
from rollout_queue.ledger.refusal import Refusal

__all__ = ["ALLOWED", "Fleet", "check_unfenced", "distrust_unproven", "drain", "put", "remove"]

_MOST_DISTRUST = 32


def put(fleet: Fleet, ledger: Ledger, wanted: Server, wall_time: float) -> Decision:
    """Register a server or change its state. A failed proof drops the ready groups that it taints, and an end of its
    service those that it never proved (I5). The learner hears of the leased ones before it trains them
    (`leases.revoked`)."""
    record = fleet.decide(wanted, wall_time, ledger.issued)
    if record is None:
        return Decision()
    before = fleet.get(wanted.name)
    if before is not None and before.state in AWAITS_PROOF and wanted.state is ServerState.JOINING:
        record = _left_unproven(record, ledger.run.version + 1)  # its old process may have swapped one in
    return _changed(ledger, _tidied(record, ledger))


def drain(fleet: Fleet, ledger: Ledger, name: str, wall_time: float) -> Decision:
    """A server is to leave: it takes no new episode from now on."""
    record = fleet.leave(name, wall_time)
    return Decision() if record is None else _changed(ledger, record)


def remove(fleet: Fleet, ledger: Ledger, names: Iterable[str]) -> Decision:
    """Servers that have drained, or are to go at once, are gone."""
    records = [record for name in names if (record := fleet.gone(name)) is not None]
    dropped = [ticket for record in records for ticket in _changed(ledger, record).tickets]
    return Decision(tuple({ticket.id: ticket for ticket in dropped}.values()), servers=tuple(records))


def distrust_unproven(fleet: Fleet, version: int) -> tuple[ServerRecord, ...]:
    """A learner session begins at `version`: what the one before left without a proof is not trusted (I5). Its groups
    are dropped as they would be leased."""
    records = [
        _left_unproven(record, version)
        for record in fleet.records
        if record.proven is not None and record.proven + 1 < version
    ]
    return tuple(records)


def _changed(ledger: Ledger, record: ServerRecord) -> Decision:
    """The record, and the end of the ready groups that can no longer be trained because of it."""
    alone = Fleet([record])
    tainted = [
        ticket
        for ticket in ledger.tickets(TicketState.READY)
        if lost(record, ticket.group) or alone.distrusted(ticket.group, ticket.serial) is not None
    ]
    return Decision(tickets.drop(tainted, reasons.UNVERIFIED_SERVER), servers=(record,))


def _left_unproven(record: ServerRecord, below: int) -> ServerRecord:
    """Versions after the one that was proven, and below this one, may have been swapped in; none was proven."""
    if record.proven is None or record.proven + 1 >= below:
        return record
    first, open_ones = record.proven + 1, [d for d in record.distrust if d.until_serial is None]
    if any(d.version <= first and (d.until_version is None or d.until_version >= below) for d in open_ones):
        return record
    # An open one that begins there is carried on, so that sessions which prove nothing do not pile them up.
    kept = tuple(d for d in record.distrust if d not in open_ones or d.until_version is None or d.version != first)
    return msgspec.structs.replace(record, distrust=(*kept, Distrust(first, None, below)))


def _tidied(record: ServerRecord, ledger: Ledger) -> ServerRecord:
    """Without the distrust that no ticket of today is old enough for, once there is much of it."""
    if len(record.distrust) <= _MOST_DISTRUST:
        return record
    oldest = ledger.oldest_serial()
    kept = tuple(d for d in record.distrust if d.until_serial is None or d.until_serial > oldest)
    return msgspec.structs.replace(record, distrust=kept)


def check_unfenced(fleet: Fleet, server: Server) -> None:
    """Refuses what only the newest learner may say of a server, which alone proves them (SESSION_SUPERSEDED), and an
    end of one that serves by somebody who takes it to be elsewhere (SERVER_MISMATCH)."""
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
