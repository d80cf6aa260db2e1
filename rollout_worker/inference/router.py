"""Decides which server a request goes to. Pure: no I/O and no clock.

A server's load is the tokens in flight on it: for each running request its prompt, once, and the tokens that its
continuations are expected to have. These tokens fill the server's KV cache, which bounds how many sequences it runs
at once. Counting requests instead would treat a first turn of 200 tokens like a twentieth turn of 8,000. An episode
whose tools run puts no load on a server but stays tied to it, because the server holds its prefix.

Weights that failed their proof taint tokens, which the queue does not take (I5). `Taints` follows the queue's rule
(`rollout_queue.ledger.servers`) from the registry alone, so that no episode continues in vain. Where the registry's
news came too late, the queue still refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from slipstream.protocol.messages import Server, ServerState

OVERLOAD_FACTOR = 2

OVERLOAD_REQUESTS = 4


@dataclass(slots=True)
class Taint:
    """Weights that failed their proof on a server, and with them all that it served until it was proven again.

    Attributes:
        version: The version that failed.
        until: The first newer version that was proven there; None while there is none.
        proven_at: The tick at which the server was proven again, which bounds the episodes in doubt to those born
            before; None while it was not.
    """

    version: int
    until: int | None = None
    proven_at: int | None = None

    def covers(self, born: int | None) -> bool:
        return self.proven_at is None or born is None or born < self.proven_at


class Taints:
    """The taints of each server. `tick`: number of updates, by which an episode is older or younger than a proof."""

    def __init__(self) -> None:
        self.tick = 0
        self._of: dict[str, list[Taint]] = {}

    @property
    def none(self) -> bool:
        """Whether no proof has failed so far, as in most runs."""
        return not self._of

    def update(self, servers: Iterable[Server]) -> None:
        """Take in the queue's registry."""
        self.tick += 1
        for server in servers:
            if server.version is None:
                continue
            if server.state is ServerState.QUARANTINED:
                self._failed(server.name, server.version)
            elif server.state is ServerState.SERVING:
                self._proven(server.name, server.version)

    def find(self, sampled: Iterable[tuple[str, int]], born: int | None) -> str | None:
        """Return the server that an episode has a tainted token of; None if there is none. `sampled`: the servers and
        versions of its tokens."""
        if self.none:
            return None
        for name, version in sampled:
            for taint in self._of.get(name, ()):
                before_end = taint.until is None or version < taint.until
                if version >= taint.version and before_end and taint.covers(born):
                    return name
        return None

    def bars(self, name: str, version: int, born: int | None) -> bool:
        """Return whether tokens that the server, at `version`, sampled for an episode could not be told from tainted
        ones. That is so where it was proven again at the version that had failed."""
        return any(
            taint.until is None and version >= taint.version and taint.covers(born) for taint in self._of.get(name, ())
        )

    def _failed(self, name: str, version: int) -> None:
        taints = self._of.setdefault(name, [])
        if not taints or taints[-1].proven_at is not None:  # otherwise the first failure still counts
            taints.append(Taint(version))

    def _proven(self, name: str, version: int) -> None:
        for taint in self._of.get(name, ()):
            if taint.proven_at is None:
                taint.proven_at = self.tick
            if taint.until is None and version > taint.version:
                taint.until = version


@dataclass(eq=False, slots=True)
class Siblings:
    """Shared by the episodes of a group: the server that their common prompt went to last."""

    server: str | None = None


@dataclass(eq=False, slots=True)
class Affinity:
    """An episode's tie to a server.

    Attributes:
        server: Name of the server; None while it has none.
        sampled: Servers and versions of its tokens.
        moves: Number of times that it continued at another server.
        waited_s: Seconds that it waited for a server.
        born: The router's tick when its ticket came; by default when it is first placed.
    """

    server: str | None = None
    siblings: Siblings = field(default_factory=Siblings)
    sampled: set[tuple[str, int]] = field(default_factory=set)
    moves: int = 0
    waited_s: float = 0.0
    born: int | None = None


class ServerLoad(NamedTuple):
    """Tokens in flight on a server, and the number of episodes tied to it."""

    tokens: int
    ties: int


class Leave(Enum):
    """The way in which requests on a server that has left end.

    FINISH: they run to their end, as the server drains. ABORT: the server still answers, so it is asked to abort them.
    CUT: it is gone, or its answers cannot be used.
    """

    FINISH = "finish"
    ABORT = "abort"
    CUT = "cut"


class Left(NamedTuple):
    """A server that no longer serves, or is another process now."""

    server: Server
    how: Leave
    why: str


def overloaded(current: ServerLoad, best: ServerLoad, need: int) -> bool:
    """Return whether a server is overloaded for a request of `need` tokens: it carries more than twice the tokens of
    the best server, and those of four such requests besides. A smaller difference is not worth computing a prefix
    again."""
    return current.tokens > OVERLOAD_FACTOR * best.tokens + OVERLOAD_REQUESTS * need


def stays(current: ServerLoad, best: ServerLoad, need: int) -> bool:
    """Return whether a request of `need` tokens goes to its episode's server rather than to the least loaded one.

    It does not where its server is overloaded, or where the best server is idle, with no episode tied to it, while its
    own runs the tokens of at least one such request.
    """
    if best == ServerLoad(0, 0):
        return current.tokens < need
    return not overloaded(current, best, need)


class Router:
    """Places episodes on serving servers only (I5). Each `begin` of a request needs its `end`, or loads add up."""

    def __init__(self) -> None:
        self.taints = Taints()
        self.newest_version = 0
        self.draining: set[str] = set()
        self._serving: dict[str, Server] = {}
        self._seen: dict[str, int] = {}
        self._distrusted: dict[str, float] = {}
        self._tokens: Counter[str] = Counter()
        self._ties: Counter[str] = Counter()

    @property
    def serving(self) -> list[str]:
        """Names of the servers that may get requests."""
        return list(self._serving)

    @property
    def tick(self) -> int:
        """Number of updates so far, by which an episode is older or younger than a proof."""
        return self.taints.tick

    def load_of(self, name: str) -> ServerLoad:
        return ServerLoad(self._tokens[name], self._ties[name])

    def update(self, servers: Iterable[Server]) -> list[Left]:
        """Take in the queue's registry. Returns the servers that no longer serve. A version seen in samples is kept
        where the registry lags behind."""
        records = {server.name: server for server in servers}
        self.taints.update(records.values())
        self.newest_version = max(self.newest_version, *(record.version or 0 for record in records.values()), 0)
        self.draining = {server.name for server in records.values() if server.state is ServerState.DRAINING}
        known, self._serving = self._serving, {}
        for server in records.values():
            if server.state is not ServerState.SERVING or server.version is None:
                continue
            if server.changed_at <= self._distrusted.get(server.name, float("-inf")):
                continue
            self._distrusted.pop(server.name, None)
            self._serving[server.name] = server
        gone = [left for server in known.values() if (left := _left(server, records.get(server.name))) is not None]
        for left in gone:
            self._seen.pop(left.server.name, None)
        return gone

    def distrust(self, name: str) -> Server | None:
        """Place nothing on this server until the registry has changed its record and lists it as serving again.

        Returns: The record; None if the server is not serving anyway.
        """
        server = self._serving.pop(name, None)
        if server is not None:
            self._distrusted[name] = server.changed_at
            self._seen.pop(name, None)
        return server

    def saw_version(self, name: str, version: int) -> None:
        """Note that the server gave samples of this version."""
        if name in self._serving:
            self._seen[name] = max(version, self._version_of(name))

    def place(
        self,
        affinities: Sequence[Affinity],
        need: int,
        avoid: str | None = None,
        admits: Callable[[str], bool] = lambda name: True,
    ) -> Server | None:
        """Tie the affinities to one server for a request.

        They return to their server if it `stays` the better one. Where it cannot be used, they follow their siblings,
        unless that server is `overloaded`. Otherwise, and at first, they go to the least loaded server.

        Args:
            need: Tokens of the request.
            avoid: A server that is used only if there is no other.
            admits: Whether a server takes requests now.

        Returns: The server; None if none may be used.
        """
        for affinity in affinities:
            if affinity.born is None:
                affinity.born = self.tick
        usable = [name for name in self._serving if admits(name) and not self._bars(name, affinities)]
        names = [name for name in usable if name != avoid] or usable
        if not names:
            return None
        name = min(names, key=lambda candidate: (self._tokens[candidate], self._ties[candidate], candidate))
        best, own, theirs = self.load_of(name), affinities[0].server, affinities[0].siblings.server
        if own in names:
            name = own if stays(self.load_of(own), best, need) else name
        elif own is not None and theirs in names:
            name = name if overloaded(self.load_of(theirs), best, need) else theirs
        self._tie(affinities, name)
        return msgspec.structs.replace(self._serving[name], version=self._version_of(name))

    def barred(self, affinities: Sequence[Affinity]) -> bool:
        """Return whether servers serve but these episodes may use none of them: the tokens would not be trained on
        (I5)."""
        if self.taints.none or not self._serving:
            return False
        return all(self._bars(name, affinities) for name in self._serving)

    def tainted(self, affinity: Affinity) -> str | None:
        """Return the server whose tokens in this episode must not be trained on (I5); None if there is none."""
        return self.taints.find(affinity.sampled, affinity.born)

    def begin(self, name: str, tokens: int) -> None:
        """Add tokens in flight on a server."""
        self._tokens[name] += tokens

    def end(self, name: str, tokens: int) -> None:
        """Remove tokens in flight from a server."""
        self._tokens[name] -= tokens

    def release(self, affinities: Sequence[Affinity]) -> None:
        """Untie the affinities from their servers."""
        for affinity in affinities:
            if affinity.server is not None:
                self._ties[affinity.server] -= 1
                affinity.server = None

    def _tie(self, affinities: Sequence[Affinity], name: str) -> None:
        for affinity in affinities:
            if affinity.server == name:
                continue
            affinity.moves += affinity.server is not None
            self.release([affinity])
            affinity.server = affinity.siblings.server = name
            self._ties[name] += 1

    def _bars(self, name: str, affinities: Sequence[Affinity]) -> bool:
        if self.taints.none:
            return False
        version = self._version_of(name)
        return any(self.taints.bars(name, version, affinity.born) for affinity in affinities)

    def _version_of(self, name: str) -> int:
        """Return the newest known version: samples show a publication before the registry does."""
        proven = self._serving[name].version
        assert proven is not None, "a serving server has a version"
        return max(proven, self._seen.get(name, proven))


def _left(known: Server, now: Server | None) -> Left | None:
    """Return how a server left that served before; None if it still serves."""
    if now is None:
        return Left(known, Leave.CUT, "it was taken out of the registry")
    if now.url != known.url:
        return Left(known, Leave.CUT, f"it serves at {now.url} now")
    if now.state is ServerState.DRAINING:
        return Left(known, Leave.FINISH, "it leaves")
    if now.state is not ServerState.SERVING or now.version is None:
        how = Leave.ABORT if now.state in (ServerState.STALE, ServerState.SYNCING) else Leave.CUT
        return Left(known, how, f"it is {now.state}" + (f" ({now.reason})" if now.reason else ""))
    if now.changed_at > known.changed_at and now.version == known.version:
        # A publication brings a newer version. With the same version it was proven again, as after a restart.
        return Left(known, Leave.CUT, "it was restarted")
    return None
