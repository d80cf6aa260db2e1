"""The vLLM servers and their states: only one whose weights were proven serves episodes (I5).

A server that (re)starts is `joining`, whatever it was before. A version that failed its proof makes what the server
sampled since suspect: groups that carry such tokens are turned away until the server is proven again, and afterwards
for tickets that were out at that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from protocol.messages import Server, ServerState
from rollout_queue.ledger.records import Distrust, ServerRecord, TicketRecord
from rollout_queue.ledger.refusal import Refusal

UNVERIFIED_SERVER = "unverified_server"

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
    """The registry. `decide` is pure; `apply` takes in what was stored."""

    def __init__(self, records: Iterable[ServerRecord] = ()) -> None:
        self._records = {record.server.name: record for record in records}

    @property
    def servers(self) -> list[Server]:
        return [record.server for record in self._records.values()]

    @property
    def served_version(self) -> int | None:
        """Lowest version proven on a serving server; None if none serves."""
        return min(
            (server.version or 0 for server in self.servers if server.state is ServerState.SERVING), default=None
        )

    def decide(self, wanted: Server, wall_time: float, serial: int) -> ServerRecord | None:
        """The server's next record, None if it is so already. `serial`: tickets issued so far.

        Raises 409 `Refusal`s: an unknown server, or a change of state that is not allowed.
        """
        known = self._records.get(wanted.name)
        if wanted.state is not ServerState.JOINING:
            if known is None:
                raise Refusal(409, "server_unknown", f"server {wanted.name!r} is not registered: put it as joining")
            if _same(known.server, wanted):
                return None
            if wanted.state not in ALLOWED[known.server.state]:
                allowed = ", ".join(sorted({ServerState.JOINING, *ALLOWED[known.server.state]}))
                raise Refusal(
                    409,
                    "transition_forbidden",
                    f"server {wanted.name!r} is {known.server.state} and cannot become {wanted.state}; from there it "
                    f"can become: {allowed}",
                )
            if wanted.state in (ServerState.SERVING, ServerState.QUARANTINED) and wanted.version is None:
                raise Refusal(409, "version_missing", f"a server cannot be {wanted.state} without a version: name it")
        distrust = known.distrust if known is not None else ()
        if wanted.state is ServerState.QUARANTINED and wanted.version is not None:
            distrust = (*(d for d in distrust if d.until_serial is not None), _open(distrust, wanted.version))
        elif wanted.state is ServerState.SERVING:
            distrust = tuple(
                Distrust(d.version, serial if d.until_serial is None else d.until_serial) for d in distrust
            )
        version = None if wanted.state is ServerState.JOINING else wanted.version
        if version is None and known is not None and wanted.state is not ServerState.JOINING:
            version = known.server.version
        return ServerRecord(msgspec.structs.replace(wanted, version=version, changed_at=wall_time), distrust)

    def apply(self, record: ServerRecord) -> None:
        self._records[record.server.name] = record

    def unverified(self, servers: Iterable[str], newest_version: int, serial: int) -> str | None:
        """The server, if any, for whose sake a group of these servers and of that ticket must not be trained."""
        for name in servers:
            record = self._records.get(name)
            for distrust in record.distrust if record is not None else ():
                covered = distrust.until_serial is None or serial < distrust.until_serial
                if covered and newest_version >= distrust.version:
                    return name
        return None

    def tainted(self, records: Iterable[TicketRecord]) -> list[TicketRecord]:
        """The groups among `records` that must not be trained."""
        return [r for r in records if self.unverified(r.servers, r.newest_version, r.serial) is not None]


def _open(distrust: Iterable[Distrust], version: int) -> Distrust:
    """The distrust of a server that failed at `version`, and perhaps at others since it was last proven."""
    return Distrust(min([version, *(d.version for d in distrust if d.until_serial is None)]))


def _same(known: Server, wanted: Server) -> bool:
    """Whether `wanted` repeats the last change, as after a lost answer."""
    return known.state is wanted.state and known.url == wanted.url and wanted.version in (None, known.version)
