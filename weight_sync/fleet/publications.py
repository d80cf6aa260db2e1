"""Records the publication of each version: it counts when a quorum of servers has the version, or is overtaken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slipstream.protocol import tracing
from slipstream.weight_sync.fleet.server_publication import Outcome
from slipstream.weight_sync.transports.base import Sent

# Number of the newest counted publications to which slower servers are still added.
_KEPT = 16


@dataclass(frozen=True)
class ServerMetrics:
    """One server's part in a publication.

    Attributes:
        transfer_s: Seconds during generation.
        pause_s: Seconds in which generation stood still.
        took_s: Seconds from the first call to the proof.
        probe_max_abs_diff: Largest difference of a log-prob of the probe, in nats.
        sent_bytes: Bytes that were sent; 0 where the transport does not tell.
        whole_bytes: Bytes of the whole snapshot; 0 where the transport does not tell.
        share_changed: Share of values that a delta changed, 0 to 1; None without a delta.
        transport: Transport that brought it; None if the server did not name it.
        generation_share: Share of the server's generation that publications take, 0 to 1; None while it is unknown.
    """

    transfer_s: float
    pause_s: float
    took_s: float
    probe_max_abs_diff: float
    sent_bytes: int = 0
    whole_bytes: int = 0
    share_changed: float | None = None
    transport: str | None = None
    generation_share: float | None = None

    @classmethod
    def of(cls, outcome: Outcome, took_s: float, transport: str | None = None) -> ServerMetrics:
        """Read the metrics from a publication's outcome."""
        sent = outcome.sent or Sent(0, 0)
        return cls(
            *(outcome.transfer_s, outcome.pause_s, took_s, outcome.proof.max_abs_diff),
            *(sent.sent_bytes, sent.whole_bytes, sent.share_changed),
            *(transport, outcome.generation_share),
        )


@dataclass
class PublishRecord:
    """One publication. It counts, and is in the records, once a quorum has it; later servers are added to it.

    Attributes:
        snapshot_s: Seconds to copy the weights.
        blocked_s: Seconds that the learner waited, the copy included.
        transfer_s: Seconds during generation, of the slowest server.
        pause_s: Seconds in which generation stood still, of the slowest server.
        probe_max_abs_diff: Largest of all servers, in nats.
        servers_ok: Names of the servers that have it, sorted.
        servers_failed: Newest reason by server name.
        servers: Metrics by server name.
        lag: Versions by which each other server was behind when it counted.
        skipped: Versions before it that were overtaken and reached no quorum.
        sent_bytes: Bytes sent to all servers.
        whole_bytes: Bytes if each had been sent the whole snapshot.
        share_changed: Largest share of values that a delta changed, 0 to 1; None without a delta.
        generation_share: Largest of all servers.
    """

    version: int
    snapshot_s: float
    blocked_s: float
    transfer_s: float = 0.0
    pause_s: float = 0.0
    probe_max_abs_diff: float = 0.0
    servers_ok: list[str] = field(default_factory=list)
    servers_failed: dict[str, str] = field(default_factory=dict)
    servers: dict[str, ServerMetrics] = field(default_factory=dict)
    lag: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    sent_bytes: int = 0
    whole_bytes: int = 0
    share_changed: float | None = None
    generation_share: float | None = None

    def add(self, name: str, metrics: ServerMetrics) -> None:
        """Add a server that has the version, or replace its metrics."""
        before = self.servers.get(name)
        self.servers[name] = metrics
        self.sent_bytes += metrics.sent_bytes - (before.sent_bytes if before else 0)
        self.whole_bytes += metrics.whole_bytes - (before.whole_bytes if before else 0)
        self.share_changed = _largest(of.share_changed for of in self.servers.values())
        self.generation_share = _largest(of.generation_share for of in self.servers.values())
        self.servers_failed.pop(name, None)
        if name not in self.servers_ok:
            self.servers_ok.append(name)
            self.servers_ok.sort()
        self.transfer_s = max(self.transfer_s, metrics.transfer_s)
        self.pause_s = max(self.pause_s, metrics.pause_s)
        self.probe_max_abs_diff = max(self.probe_max_abs_diff, metrics.probe_max_abs_diff)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


class Publications:
    """The publications of one learner.

    Attributes:
        quorum: Number of servers that make a publication count.
        records: Publications that counted, in the order in which they did.
        counted: The newest version that counted, None before the first.
    """

    def __init__(self, quorum: int) -> None:
        self.quorum = quorum
        self.records: list[PublishRecord] = []
        self.counted: int | None = None
        self._known: dict[int, PublishRecord] = {}
        self._spans: dict[int, tracing.Span] = {}

    def reached(self, version: int) -> list[str]:
        """Return the names of the servers that have `version`."""
        return self._known[version].servers_ok if version in self._known else []

    def handed(self, version: int, snapshot_s: float) -> None:
        """Begin the record of a version. The learner waited for the copy only: `snapshot_s` seconds."""
        self._known[version] = PublishRecord(version, snapshot_s, blocked_s=snapshot_s)
        self._spans[version] = tracing.span("publication", published=version, snapshot_s=snapshot_s)

    def why_failed(self, version: int) -> dict[str, str]:
        """Return the newest reason by server name."""
        return dict(self._known[version].servers_failed) if version in self._known else {}

    def failed(self, name: str, version: int, reason: str) -> None:
        """Note why a server does not have a version."""
        if (record := self._known.get(version)) is not None and name not in record.servers:
            record.servers_failed[name] = reason

    def proven(self, name: str, version: int, metrics: ServerMetrics, served: Mapping[str, int | None]) -> bool:
        """Add a server to a version's record. Returns whether the publication counts from now on.

        Args:
            served: The version that each server serves, by name; None before its first.
        """
        record = self._known.get(version)
        if record is None:
            return False
        record.add(name, metrics)
        over = self.counted is not None and version <= self.counted
        if over or len(record.servers_ok) < self.quorum:
            return False
        overtaken = [of for of in self._known if of < version and (self.counted is None or of > self.counted)]
        record.skipped = len(overtaken)
        record.lag = {
            other: version - has for other, has in served.items() if other != name and has is not None and has < version
        }
        self.counted = version
        self._end_spans(record)
        self.records.append(record)
        kept = {of.version for of in self.records[-_KEPT:]}
        self._known = {of: each for of, each in self._known.items() if of > version or of in kept}
        return True

    def give_up(self) -> None:
        """Forget the versions that have not counted. Nothing waits for them any more."""
        self._known = {of: each for of, each in self._known.items() if self.counted is not None and of <= self.counted}
        for span in self._spans.values():
            span.fail("no quorum")
            span.end()
        self._spans.clear()

    def _end_spans(self, counted: PublishRecord) -> None:
        """End the span of a version that counts, and of those that it has overtaken."""
        for version in [of for of in self._spans if of <= counted.version]:
            span = self._spans.pop(version)
            if version < counted.version:
                span.fail("overtaken")
            else:
                span.set(
                    servers=counted.servers_ok,
                    transfer_s=counted.transfer_s,
                    pause_s=counted.pause_s,
                    sent_bytes=counted.sent_bytes,
                )
            span.end()
