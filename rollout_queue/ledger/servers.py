"""The vLLM servers and their states: only one whose weights were proven serves episodes (I5).

A server that starts or restarts is `joining`, whatever it was before. Once a version fails its proof, what the server
samples under that version or a newer one is distrusted until the server is proven again, and that part of it still
afterwards: groups with such tokens are rejected at the door, dropped where they wait, and taken back from the learner
where it has leased but not yet trained them. What a server sampled before it became unreachable stays good; of one
that joined again, tickets issued from then on take nothing until it is proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from protocol import reasons
from protocol.messages import Server, ServerState
from rollout_queue.ledger import tickets
from rollout_queue.ledger.group_facts import GroupFacts
from rollout_queue.ledger.ledger import Ledger
from rollout_queue.ledger.records import Decision, Distrust, ServerRecord, TicketState
from rollout_queue.ledger.refusal import Refusal

_MOST_SERVERS = 1024
_REASON_CHARACTERS = 1024

_S = ServerState
ALLOWED: Mapping[ServerState, frozenset[ServerState]] = {
    _S.JOINING: frozenset({_S.SYNCING}),
    _S.SYNCING: frozenset({_S.SERVING, _S.STALE, _S.QUARANTINED, _S.DOWN}),
    # A later version is proven while the one before goes on serving.
    _S.SERVING: frozenset({_S.SERVING, _S.SYNCING, _S.STALE, _S.QUARANTINED, _S.DOWN}),
    _S.STALE: frozenset({_S.SYNCING}),
    _S.QUARANTINED: frozenset({_S.SYNCING}),
    _S.DOWN: frozenset({_S.SYNCING}),
}


class Fleet:
    """The registry of servers. `decide` is pure; `apply` takes in what was stored."""

    def __init__(self, records: Iterable[ServerRecord] = ()) -> None:
        self._records = {record.server.name: record for record in records}

    @property
    def servers(self) -> list[Server]:
        return [record.server for record in self._records.values()]

    def get(self, name: str) -> Server | None:
        record = self._records.get(name)
        return record.server if record is not None else None

    @property
    def served_version(self) -> int | None:
        """Lowest version proven on a serving server; None if none serves."""
        return min(
            (server.version or 0 for server in self.servers if server.state is ServerState.SERVING), default=None
        )

    def decide(self, wanted: Server, wall_time: float, serial: int) -> ServerRecord | None:
        """The server's next record, None if nothing changes. `serial`: tickets issued so far.

        Refuses an unknown server (SERVER_UNKNOWN) and a change that is not allowed (TRANSITION_FORBIDDEN,
        VERSION_MISSING).
        """
        known = self._records.get(wanted.name)
        if known is None and len(self._records) >= _MOST_SERVERS:
            raise Refusal(
                reasons.TOO_MANY, f"{len(self._records)} servers are registered, which is all that one run may have"
            )
        if wanted.state is not ServerState.JOINING:
            if known is None:
                raise Refusal(
                    reasons.SERVER_UNKNOWN, f"server {wanted.name!r} is not registered: put it as joining first"
                )
            now = known.server
            if (now.state, now.url) == (wanted.state, wanted.url) and wanted.version in (None, now.version):
                return None  # a repeat, as after a lost answer
            if wanted.state not in ALLOWED[known.server.state]:
                allowed = ", ".join(sorted({ServerState.JOINING, *ALLOWED[known.server.state]}))
                raise Refusal(
                    reasons.TRANSITION_FORBIDDEN,
                    f"server {wanted.name!r} is {known.server.state} and cannot become {wanted.state}; from there it "
                    f"can become: {allowed}",
                )
            if wanted.state in (ServerState.SERVING, ServerState.QUARANTINED) and wanted.version is None:
                raise Refusal(reasons.VERSION_MISSING, f"a server cannot be {wanted.state} without a version: name it")
        distrust = known.distrust if known is not None else ()
        if wanted.state is ServerState.QUARANTINED and wanted.version is not None:
            distrust = (*(d for d in distrust if d.until_serial is not None), _distrust_from(wanted.version, distrust))
        elif wanted.state is ServerState.SERVING and wanted.version is not None:
            distrust = tuple(_proven_at(wanted.version, serial, d) for d in distrust)
        version = None if wanted.state is ServerState.JOINING else wanted.version
        if version is None and known is not None and wanted.state is not ServerState.JOINING:
            version = known.server.version
        # Cut, not refused: an error's text must not keep a server in service.
        reason = wanted.reason and wanted.reason[:_REASON_CHARACTERS]
        server = msgspec.structs.replace(wanted, version=version, reason=reason, changed_at=wall_time)
        served = wanted.state is ServerState.SERVING or (known is not None and known.served)
        restarted_at = known.restarted_at if known is not None else None
        if wanted.state is ServerState.SERVING:
            restarted_at = None
        elif wanted.state is ServerState.JOINING and served and restarted_at is None:
            restarted_at = serial
        return ServerRecord(server, served, distrust, restarted_at)

    def apply(self, record: ServerRecord) -> None:
        self._records[record.server.name] = record

    def distrusted(self, group: GroupFacts, serial: int) -> str | None:
        """The server, if any, because of which this group, of the ticket with this serial, must not be trained."""
        for sampled in group.servers:
            record = self._records.get(sampled.server)
            for distrust in record.distrust if record is not None else ():
                covered = distrust.until_serial is None or serial < distrust.until_serial
                before_end = distrust.until_version is None or sampled.oldest < distrust.until_version
                if covered and before_end and sampled.newest >= distrust.version:
                    return sampled.server
        return None

    def check(self, group: GroupFacts, serial: int) -> None:
        """Rejects a group by a server that nobody registered (SPAN_SERVER_UNKNOWN), that never served, that was not
        proven between its restart and the ticket, or that is distrusted for it (UNVERIFIED_SERVER)."""
        for name in (sampled.server for sampled in group.servers):
            record = self._records.get(name)
            if record is None:
                raise Refusal(
                    reasons.SPAN_SERVER_UNKNOWN,
                    f"server {name[:80]!r} sampled some of its tokens but is not registered",
                )
            if not record.served:
                raise Refusal(
                    reasons.UNVERIFIED_SERVER,
                    f"server {name} sampled some of its tokens but was never proven: it is {record.server.state}",
                )
            if record.restarted_at is not None and serial >= record.restarted_at:
                raise Refusal(
                    reasons.UNVERIFIED_SERVER,
                    f"server {name} sampled some of its tokens, for a ticket issued after it joined again, but is not "
                    f"proven since: it is {record.server.state}",
                )
        server = self.distrusted(group, serial)
        if server is not None:
            raise Refusal(
                reasons.UNVERIFIED_SERVER,
                f"server {server} sampled some of its tokens with weights that failed their proof",
            )


def put(fleet: Fleet, ledger: Ledger, wanted: Server, wall_time: float) -> Decision:
    """Register a server or change its state; a failed proof drops the ready groups that it taints (I5). The learner
    hears of the leased ones before it trains them (`leases.revoked`)."""
    record = fleet.decide(wanted, wall_time, ledger.issued)
    if record is None:
        return Decision()
    tainted = []
    if wanted.state is ServerState.QUARANTINED:
        alone = Fleet([record])
        ready = ledger.tickets(TicketState.READY)
        tainted = [ticket for ticket in ready if alone.distrusted(ticket.group, ticket.serial) is not None]
    return Decision(tickets.drop(tainted, reasons.UNVERIFIED_SERVER), server=record)


def _distrust_from(version: int, distrust: Iterable[Distrust]) -> Distrust:
    """The distrust of a server that failed at `version`, and perhaps at others since it was last proven."""
    return Distrust(min([version, *(d.version for d in distrust if d.until_serial is None)]))


def _proven_at(version: int, serial: int, distrust: Distrust) -> Distrust:
    """The distrust that is left once the server is proven at `version`."""
    if distrust.until_serial is None:
        distrust = msgspec.structs.replace(distrust, until_serial=serial)
    if distrust.until_version is None and version > distrust.version:
        distrust = msgspec.structs.replace(distrust, until_version=version)
    return distrust


def check_unfenced(fleet: Fleet, server: Server) -> None:
    """Refuses what only the newest learner may say of a server, which alone proves them (SESSION_SUPERSEDED), and an
    end of one that serves by somebody who takes it to be elsewhere (SERVER_MISMATCH)."""
    if server.state not in (ServerState.JOINING, ServerState.DOWN):
        raise Refusal(
            reasons.SESSION_SUPERSEDED,
            f"server {server.name!r} cannot become {server.state} without the learner's session: others may only "
            f"register it as joining, or report it as down",
        )
    known = fleet.get(server.name)
    if known is not None and known.state is ServerState.SERVING and known.url != server.url:
        raise Refusal(
            reasons.SERVER_MISMATCH,
            f"server {server.name!r} serves at {known.url}, not at {server.url[:200]!r}: name another server, or "
            f"report that one as down first",
        )
