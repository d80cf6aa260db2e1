"""What became of each version: its publication counts when a quorum of servers has it, or it is overtaken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weight_sync.fleet.server_publication import Outcome
from weight_sync.transports.base import Sent

# Of publications that counted, the newest ones, to which slower servers are still added.
_KEPT = 16


@dataclass(frozen=True)
class ServerFigures:
    """One server's part in a publication, in seconds: `transfer_s` and `pause_s` as in `server_sync.Outcome`; `took_s`
    from its first call to its proof; `probe_max_abs_diff` in nats. `sent_bytes`, `whole_bytes` and `share_changed` as
    in `transports.base.Sent`, 0 and None where the transport does not tell; `transport`: what brought it."""

    transfer_s: float
    pause_s: float
    took_s: float
    probe_max_abs_diff: float
    sent_bytes: int = 0
    whole_bytes: int = 0
    share_changed: float | None = None
    transport: str | None = None

    @classmethod
    def of(cls, outcome: Outcome, took_s: float, transport: str | None = None) -> ServerFigures:
        sent = outcome.sent or Sent(0, 0)
        return cls(
            *(outcome.transfer_s, outcome.pause_s, took_s, outcome.probe_max_abs_diff),
            *(sent.sent_bytes, sent.whole_bytes, sent.share_changed),
            transport,
        )


@dataclass
class PublishRecord:
    """One publication, in seconds: `snapshot_s` to copy the weights; `blocked_s`, the learner's wait, copy included;
    `transfer_s` and `pause_s` of the slowest server (see `server_sync.Outcome`). `probe_max_abs_diff`: the largest of
    all servers. `sent_bytes` to all servers, where everything would be `whole_bytes`; `share_changed`: the largest
    share of values that a delta had, None without one. `servers_failed`: the reason by server name.

    It counts, and is in the records, once a quorum has it; servers that get the version later are added to it.
    `servers`: the figures of each; `lag`: versions by which each other server was behind when it counted; `skipped`:
    versions before it that were overtaken and reached no quorum.
    """

    version: int
    snapshot_s: float
    blocked_s: float
    transfer_s: float = 0.0
    pause_s: float = 0.0
    probe_max_abs_diff: float = 0.0
    servers_ok: list[str] = field(default_factory=list)
    servers_failed: dict[str, str] = field(default_factory=dict)
    servers: dict[str, ServerFigures] = field(default_factory=dict)
    lag: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    sent_bytes: int = 0
    whole_bytes: int = 0
    share_changed: float | None = None

    def add(self, name: str, figures: ServerFigures) -> None:
        before = self.servers.get(name)
        self.servers[name] = figures
        self.sent_bytes += figures.sent_bytes - (before.sent_bytes if before else 0)
        self.whole_bytes += figures.whole_bytes - (before.whole_bytes if before else 0)
        shares = [of.share_changed for of in self.servers.values() if of.share_changed is not None]
        self.share_changed = max(shares, default=None)
        self.servers_failed.pop(name, None)
        if name not in self.servers_ok:
            self.servers_ok.append(name)
            self.servers_ok.sort()
        self.transfer_s = max(self.transfer_s, figures.transfer_s)
        self.pause_s = max(self.pause_s, figures.pause_s)
        self.probe_max_abs_diff = max(self.probe_max_abs_diff, figures.probe_max_abs_diff)


class Publications:
    """`records`: those that counted, in the order in which they did; `quorum`: servers that make one count."""

    def __init__(self, quorum: int) -> None:
        self.quorum = quorum
        self.records: list[PublishRecord] = []
        self.counted: int | None = None
        self._known: dict[int, PublishRecord] = {}

    def reached(self, version: int) -> list[str]:
        """The servers that have a version."""
        return self._known[version].servers_ok if version in self._known else []

    def handed(self, version: int, snapshot_s: float) -> None:
        """The learner waited for the copy alone."""
        self._known[version] = PublishRecord(version, snapshot_s, blocked_s=snapshot_s)

    def why_failed(self, version: int) -> dict[str, str]:
        """The newest reason by server."""
        return dict(self._known[version].servers_failed) if version in self._known else {}

    def failed(self, name: str, version: int, reason: str) -> None:
        if (record := self._known.get(version)) is not None and name not in record.servers:
            record.servers_failed[name] = reason

    def proven(self, name: str, version: int, figures: ServerFigures, served: Mapping[str, int | None]) -> bool:
        """A server has a version; whether the publication counts by that. `served`: what each other server has."""
        record = self._known.get(version)
        if record is None:
            return False
        record.add(name, figures)
        over = self.counted is not None and version <= self.counted
        if over or len(record.servers_ok) < self.quorum:
            return False
        overtaken = [of for of in self._known if of < version and (self.counted is None or of > self.counted)]
        record.skipped = len(overtaken)
        record.lag = {
            other: version - has for other, has in served.items() if other != name and has is not None and has < version
        }
        self.counted = version
        self.records.append(record)
        kept = {of.version for of in self.records[-_KEPT:]}
        self._known = {of: each for of, each in self._known.items() if of > version or of in kept}
        return True

    def give_up(self) -> None:
        """What is in flight reaches no quorum, and nobody waits for it any more."""
        self._known = {of: each for of, each in self._known.items() if self.counted is not None and of <= self.counted}
