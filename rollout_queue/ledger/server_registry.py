"""The registry of servers, and whose tokens may be trained: a server serves only with proven weights (I5).

- A server that starts or restarts is `joining`, whatever it was before.
- Once a version fails its proof, what the server samples under that version or a newer one is distrusted until the
  server is proven again, and what it sampled meanwhile stays distrusted.
- What a server sampled before it became unreachable stays good. A server that joined again must be proven before
  tickets issued since then accept its tokens.
- Tokens sampled between a swap and its proof wait in the queue until the proof holds.

`servers` decides what follows for tickets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_queue.ledger.records import Distrust, GroupFacts, Refusal, SampledBy, ServerRecord

_MAX_SERVERS = 1024

# Including servers that have left, since their groups may still come.
_MAX_EVER = 16 * 1024

_MAX_REASON_CHARACTERS = 1024

_S = ServerState

ALLOWED: Mapping[ServerState, frozenset[ServerState]] = {
    _S.JOINING: frozenset({_S.SYNCING, _S.DOWN, _S.DRAINING}),
    _S.SYNCING: frozenset({_S.SERVING, _S.STALE, _S.QUARANTINED, _S.DOWN, _S.DRAINING}),
    # SERVING again: a later version is proven while the one before continues serving.
    _S.SERVING: frozenset({_S.SERVING, _S.SYNCING, _S.STALE, _S.QUARANTINED, _S.DOWN, _S.DRAINING}),
    _S.STALE: frozenset({_S.SYNCING, _S.DOWN, _S.DRAINING}),
    _S.QUARANTINED: frozenset({_S.SYNCING, _S.DOWN, _S.DRAINING}),
    _S.DOWN: frozenset({_S.SYNCING, _S.DRAINING}),
    # It ends by its removal.
    _S.DRAINING: frozenset(),
}

# States in which the proof of what a server has sampled may still come.
AWAITS_PROOF = frozenset({_S.SYNCING, _S.SERVING})

# States whose reason may change without a change of state.
_REASON_MAY_CHANGE = frozenset({_S.JOINING, _S.SYNCING, _S.STALE, _S.DOWN})


class ServerRegistry:
    """Servers by name. Decisions are pure; `apply` takes them in.

    What requests read of the whole fleet is kept up to date change by change, or derived once for each.

    Attributes:
        revision: Grows by one with each change of `servers`.
    """

    def __init__(self, records: Iterable[ServerRecord] = ()) -> None:
        self._records: dict[str, ServerRecord] = {}
        self._in_fleet: dict[str, ServerRecord] = {}
        self._servers: dict[str, Server] = {}
        self._serving: dict[str, int] = {}  # version by name
        self._served_version: int | None = None
        self.revision = 0
        for record in records:
            self.apply(record)

    @property
    def servers(self) -> list[Server]:
        return list(self._servers.values())

    @property
    def records(self) -> list[ServerRecord]:
        """Records of the servers in the fleet; those that have left are left out."""
        return list(self._in_fleet.values())

    def get(self, name: str) -> Server | None:
        return self._servers.get(name)

    def record(self, name: str) -> ServerRecord | None:
        """Return the record of a server that is or was in the fleet."""
        return self._records.get(name)

    def has_had(self, name: str, url: str) -> bool:
        """Tell whether a server of that name and address is or was in the fleet."""
        record = self._records.get(name)
        return record is not None and record.server.url == url

    def after(self, records: Iterable[ServerRecord]) -> ServerRegistry:
        """Return the registry as it will be once `records` are stored."""
        return ServerRegistry([*self._records.values(), *records])

    @property
    def served_version(self) -> int | None:
        """The lowest version that serves; None if no server serves."""
        return self._served_version

    def all_serve(self, names: Iterable[str]) -> bool:
        """Tell whether each of these servers serves."""
        return all(name in self._serving for name in names)

    def decide(self, wanted: Server, wall_time: float, serial: int) -> ServerRecord | None:
        """Return the server's next record; None if nothing changes.

        Args:
            wanted: The server as it should be.
            wall_time: Current time, seconds.
            serial: Tickets issued so far.

        Raises:
            Refusal: SERVER_UNKNOWN; TOO_MANY; TRANSITION_FORBIDDEN or VERSION_MISSING for a change that is not allowed.
        """
        known = self._in_fleet.get(wanted.name)
        # It is cut, not refused: the length of an error's text must not keep a server in service.
        reason = wanted.reason and wanted.reason[:_MAX_REASON_CHARACTERS]
        if known is None:
            if wanted.state is not ServerState.JOINING:
                raise Refusal(
                    reasons.SERVER_UNKNOWN, f"server {wanted.name!r} is not registered: put it as joining first"
                )
            self._check_room(wanted.name)
        elif known.awaits_verdict and (wanted.state, wanted.url) == (_S.DRAINING, known.server.url):
            return msgspec.structs.replace(known, awaits_verdict=False)
        elif (now := known.server) and (now.state, now.url) == (wanted.state, wanted.url):
            if reason is not None and now.state in _REASON_MAY_CHANGE:
                return msgspec.structs.replace(known, server=msgspec.structs.replace(now, reason=reason))
            if now.state is ServerState.SERVING and wanted.version in (None, now.version) and wanted.slow != now.slow:
                slow = wanted.slow and wanted.slow[:_MAX_REASON_CHARACTERS]
                return msgspec.structs.replace(known, server=msgspec.structs.replace(now, slow=slow))
            repeated = wanted.state is not ServerState.JOINING and wanted.version in (None, now.version)
            if repeated and reason in (None, now.reason):
                return None  # a repeat, as after a lost answer
        if known is not None and (verdict := _verdict_of_draining(known, wanted, serial)) is not None:
            return verdict
        if known is not None:
            _check_allowed(known.server, wanted)
        known = known or self._records.get(wanted.name)  # a removed server that comes back
        version = None if wanted.state is ServerState.JOINING else wanted.version
        if version is None and known is not None and wanted.state is not ServerState.JOINING:
            version = known.server.version
        proof = wanted.proof if wanted.proof is not None or known is None else known.server.proof
        server = msgspec.structs.replace(wanted, version=version, reason=reason, changed_at=wall_time, proof=proof)
        return _next_record(known or ServerRecord(server), server, serial)

    def leave(self, name: str, wall_time: float) -> ServerRecord | None:
        """Return the record of a server that shall drain; None if it drains already or has left.

        Raises:
            Refusal: SERVER_UNKNOWN for one that never was in the fleet.
        """
        known = self._records.get(name)
        if known is None:
            raise Refusal(reasons.SERVER_UNKNOWN, f"server {name[:80]!r} is not registered")
        if known.removed or known.server.state is ServerState.DRAINING:
            return None
        server = msgspec.structs.replace(
            known.server, state=ServerState.DRAINING, reason="it was asked to leave", changed_at=wall_time
        )
        return msgspec.structs.replace(known, server=server, awaits_verdict=known.server.state in AWAITS_PROOF)

    def gone(self, name: str) -> ServerRecord | None:
        """Return the record of a server that has left; None if it had left before."""
        known = self._in_fleet.get(name)
        return msgspec.structs.replace(known, removed=True) if known is not None else None

    def apply(self, record: ServerRecord) -> None:
        name, server = record.server.name, record.server
        before = self.get(name)
        self._records[name] = record
        if record.removed:
            for of_fleet in (self._in_fleet, self._servers):
                of_fleet.pop(name, None)
        else:
            self._in_fleet[name], self._servers[name] = record, server
        if server.state is ServerState.SERVING and not record.removed:
            self._serving[name] = server.version or 0
        else:
            self._serving.pop(name, None)
        self._served_version = min(self._serving.values(), default=None)
        if before != self.get(name):
            self.revision += 1

    def distrusted(self, group: GroupFacts, serial: int) -> str | None:
        """Return the server whose distrust forbids to train this group; None if there is none.

        Args:
            group: What sampled the group.
            serial: Serial of the group's ticket.
        """
        for sampled in group.servers:
            record = self._records.get(sampled.server)
            if record is not None and distrusts(record, sampled, serial):
                return sampled.server
        return None

    def is_proven(self, name: str, version: int) -> bool:
        """Tell whether this version, or a newer one, was proven on a server. True for a server that is not known."""
        record = self._records.get(name)
        return record is None or (record.proven is not None and version <= record.proven)

    def unproven(self, group: GroupFacts) -> str | None:
        """Return a server that sampled tokens of this group with weights not proven on it yet; None if none did."""
        return next((by.server for by in group.servers if not self.is_proven(by.server, by.newest)), None)

    def check_group(self, group: GroupFacts, serial: int) -> None:
        """Reject a group sampled by servers that may not have sampled it.

        Raises:
            Refusal: SPAN_SERVER_UNKNOWN for a server that is not registered; UNVERIFIED_SERVER for one that never
                served, was not proven between its restart and the ticket, is distrusted, or left unproven.
        """
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
                f"server {server} sampled some of its tokens with weights that failed their proof or left service "
                "before it",
            )
        for sampled in group.servers:
            record = self._records[sampled.server]
            if lost(record, group):
                raise Refusal(
                    reasons.UNVERIFIED_SERVER,
                    f"server {sampled.server} sampled some of its tokens by version {sampled.newest}, which was never "
                    f"proven on it: it {'has left' if record.removed else f'is {record.server.state}'}",
                )

    def _check_room(self, name: str) -> None:
        if len(self._in_fleet) >= _MAX_SERVERS or (name not in self._records and len(self._records) >= _MAX_EVER):
            raise Refusal(
                reasons.TOO_MANY,
                f"{len(self._in_fleet)} servers are registered, and {len(self._records)} ever were, which is all that "
                f"one run may have",
            )


def distrusts(record: ServerRecord, sampled: SampledBy, serial: int) -> bool:
    """Tell whether a server's distrust forbids to train what it sampled for the ticket of this serial."""
    for distrust in record.distrust:
        covered = distrust.until_serial is None or serial < distrust.until_serial
        before_end = distrust.until_version is None or sampled.oldest < distrust.until_version
        if covered and before_end and sampled.newest >= distrust.version:
            return True
    return False


def awaits_proof(record: ServerRecord) -> bool:
    """Tell whether the proof of what the server has sampled may still come."""
    return (record.server.state in AWAITS_PROOF or record.awaits_verdict) and not record.removed


def lost(record: ServerRecord, group: GroupFacts) -> bool:
    """Tell whether the server left service before the proof of what it sampled of the group."""
    return not awaits_proof(record) and any(
        sampled.server == record.server.name and (record.proven is None or sampled.newest > record.proven)
        for sampled in group.servers
    )


def _verdict_of_draining(known: ServerRecord, wanted: Server, serial: int) -> ServerRecord | None:
    """Return the record of a draining server whose last version the learner has verified: it continues draining.

    None if `wanted` is no such verdict.
    """
    drains = known.server.state is _S.DRAINING and known.server.url == wanted.url
    if not drains or wanted.version is None or wanted.state not in (_S.SERVING, _S.QUARANTINED):
        return None
    judged = _next_record(known, wanted, serial)
    server = msgspec.structs.replace(known.server, version=wanted.version)
    return msgspec.structs.replace(judged, server=server)


def _check_allowed(now: Server, wanted: Server) -> None:
    again = wanted.state is ServerState.JOINING and now.state is not ServerState.DRAINING
    if not again and wanted.state not in ALLOWED[now.state]:
        others = {ServerState.JOINING, *ALLOWED[now.state]} if ALLOWED[now.state] else set()
        allowed = ", ".join(sorted(others)) or "nothing; it leaves, and may register again once it is gone"
        raise Refusal(
            reasons.TRANSITION_FORBIDDEN,
            f"server {wanted.name!r} is {now.state} and cannot become {wanted.state}; from there it can become: "
            f"{allowed}",
        )
    if wanted.state in (ServerState.SERVING, ServerState.QUARANTINED) and wanted.version is None:
        raise Refusal(reasons.VERSION_MISSING, f"a server cannot be {wanted.state} without a version: name it")


def _next_record(known: ServerRecord, server: Server, serial: int) -> ServerRecord:
    distrust, proven, restarted_at = known.distrust, known.proven, known.restarted_at
    served = known.served or server.state is ServerState.SERVING
    if server.state is ServerState.QUARANTINED and server.version is not None:
        distrust = (*(d for d in distrust if d.until_serial is not None), _distrust_from(server.version, distrust))
    elif server.state is ServerState.SERVING and server.version is not None:
        distrust = tuple(_proven_at(server.version, serial, d) for d in distrust)
        proven, restarted_at = max(server.version, -1 if proven is None else proven), None
    elif server.state is ServerState.JOINING and served and restarted_at is None:
        restarted_at = serial
    return ServerRecord(server, served, distrust, restarted_at, proven)


def _distrust_from(version: int, distrust: Iterable[Distrust]) -> Distrust:
    """Return the distrust of a server that failed at `version`, and maybe at earlier ones since its last proof."""
    return Distrust(min([version, *(d.version for d in distrust if d.until_serial is None)]))


def _proven_at(version: int, serial: int, distrust: Distrust) -> Distrust:
    """Return what is left of a distrust once the server is proven at `version`."""
    if distrust.until_serial is None:
        distrust = msgspec.structs.replace(distrust, until_serial=serial)
    if distrust.until_version is None and version > distrust.version:
        distrust = msgspec.structs.replace(distrust, until_version=version)
    return distrust
