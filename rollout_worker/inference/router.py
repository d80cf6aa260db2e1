"""Which server a affinity samples from: sticky, for its prefix cache, and least loaded. Pure; no I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from protocol.messages import Server, ServerState


@dataclass(eq=False, slots=True)
class Affinity:
    """One episode's tie to a server. `visited` holds every server that it was placed on."""

    server: str | None = None
    visited: list[str] = field(default_factory=list)


class Router:
    """Places affinities on serving servers only (I5). A server's load is the number of affinities tied to it."""

    def __init__(self) -> None:
        self._serving: dict[str, Server] = {}
        self._distrusted: dict[str, float] = {}
        self._load: Counter[str] = Counter()

    @property
    def serving(self) -> bool:
        """Whether any server may be given a affinity."""
        return bool(self._serving)

    def load_of(self, name: str) -> int:
        return self._load[name]

    def update(self, servers: Iterable[Server]) -> None:
        """Take over the fleet registry. A version seen in samples outlives a registry that lags behind."""
        known = self._serving
        self._serving = {}
        for server in servers:
            if server.state is not ServerState.SERVING or server.version is None:
                continue
            if server.changed_at <= self._distrusted.get(server.name, float("-inf")):
                continue
            self._distrusted.pop(server.name, None)
            seen = known[server.name].version if server.name in known else None
            version = server.version if seen is None else max(server.version, seen)
            self._serving[server.name] = msgspec.structs.replace(server, version=version)

    def distrust(self, name: str) -> Server | None:
        """Place nothing on this server until the registry has changed its record and calls it serving again.

        Gives the record, or None where it is not serving anyway.
        """
        server = self._serving.pop(name, None)
        if server is not None:
            self._distrusted[name] = server.changed_at
        return server

    def saw_version(self, name: str, version: int) -> None:
        """Samples of this version came from the server."""
        server = self._serving.get(name)
        if server is not None and (server.version is None or version > server.version):
            self._serving[name] = msgspec.structs.replace(server, version=version)

    def place(self, affinities: Sequence[Affinity], avoid: str | None = None) -> Server | None:
        """One server for all the affinities, which are tied to it; None if none serves.

        They stay where they are, unless their server left, is the one to avoid, or carries others while a server
        stands idle; then they move to the least loaded one. The one to avoid is taken if there is no other.
        """
        names = [name for name in self._serving if name != avoid] or list(self._serving)
        if not names:
            self.release(affinities)
            return None
        current = affinities[0].server
        together = all(affinity.server == current for affinity in affinities)
        if current is not None and together and current in names and not self._should_leave(current, affinities, names):
            return self._serving[current]
        self.release(affinities)
        name = min(names, key=lambda candidate: (self._load[candidate], candidate))
        for affinity in affinities:
            affinity.server = name
            if name not in affinity.visited:
                affinity.visited.append(name)
        self._load[name] += len(affinities)
        return self._serving[name]

    def release(self, affinities: Sequence[Affinity]) -> None:
        """Untie the affinities from their servers."""
        for affinity in affinities:
            if affinity.server is not None:
                self._load[affinity.server] -= 1
                affinity.server = None

    def _should_leave(self, current: str, affinities: Sequence[Affinity], names: Sequence[str]) -> bool:
        idle = any(self._load[name] == 0 for name in names)
        return idle and self._load[current] > len(affinities)
