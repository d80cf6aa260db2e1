"""Which server an episode samples from.

`Router` decides, without I/O or clock: the same server for all turns, for its prefix cache, and the least loaded one at
the start. `ServerPool` waits until a server serves, and tells the queue of one that samples from unknown weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from protocol.messages import Server, ServerState

logger = logging.getLogger(__name__)

ReportServer = Callable[[Server], Awaitable[None]]


@dataclass(eq=False, slots=True)
class Affinity:
    """An episode's tie to a server, by name; None while it has none."""

    server: str | None = None


class Router:
    """Places affinities on serving servers only (I5). A server's load is the number of affinities tied to it."""

    def __init__(self) -> None:
        self._serving: dict[str, Server] = {}
        self._distrusted: dict[str, float] = {}
        self._load: Counter[str] = Counter()

    @property
    def serving(self) -> bool:
        """Whether any server may be given an affinity."""
        return bool(self._serving)

    def load_of(self, name: str) -> int:
        return self._load[name]

    def update(self, servers: Iterable[Server]) -> None:
        """Take the queue's registry over; a version seen in samples is kept where the registry lags behind."""
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

        Gives the record, or None if the server is not serving anyway.
        """
        server = self._serving.pop(name, None)
        if server is not None:
            self._distrusted[name] = server.changed_at
        return server

    def saw_version(self, name: str, version: int) -> None:
        """The server gave samples of this version."""
        server = self._serving.get(name)
        if server is not None and (server.version is None or version > server.version):
            self._serving[name] = msgspec.structs.replace(server, version=version)

    def place(self, affinities: Sequence[Affinity], avoid: str | None = None) -> Server | None:
        """Tie all the affinities to one server, and give it; None if none serves.

        They stay where they are, unless their server left, is the one to avoid, or carries others while a server
        stands idle; then they move to the least loaded one. The one to avoid is taken if there is no other.
        """
        names = [name for name in self._serving if name != avoid] or list(self._serving)
        current = affinities[0].server
        if current in names and all(affinity.server == current for affinity in affinities):
            idle_elsewhere = any(self._load[name] == 0 for name in names)
            if not (idle_elsewhere and self._load[current] > len(affinities)):
                return self._serving[current]
        self.release(affinities)
        if not names:
            return None
        name = min(names, key=lambda candidate: (self._load[candidate], candidate))
        for affinity in affinities:
            affinity.server = name
        self._load[name] += len(affinities)
        return self._serving[name]

    def release(self, affinities: Sequence[Affinity]) -> None:
        """Untie the affinities from their servers."""
        for affinity in affinities:
            if affinity.server is not None:
                self._load[affinity.server] -= 1
                affinity.server = None


class ServerPool:
    """The servers to sample from. `report` tells the queue of a server's new state."""

    def __init__(self, report: ReportServer) -> None:
        self._router = Router()
        self._report = report
        self._serving = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self._serving.is_set()

    async def wait_serving(self) -> None:
        await self._serving.wait()

    def update(self, servers: Iterable[Server]) -> None:
        """Take the registry over, as it came with an answer of the queue."""
        self._router.update(servers)
        self._set_serving()

    async def place(self, affinities: Sequence[Affinity], avoid: str | None = None) -> Server:
        """One server for all the affinities; waits while none serves."""
        while (server := self._router.place(affinities, avoid)) is None:
            await self._serving.wait()
        return server

    def release(self, affinities: Sequence[Affinity]) -> None:
        self._router.release(affinities)

    def saw_version(self, name: str, version: int) -> None:
        self._router.saw_version(name, version)

    async def distrust(self, name: str, label: str) -> None:
        """The server samples from weights labelled `label`, which is not a version of ours: stop using it, and tell
        the queue."""
        server = self._router.distrust(name)
        if server is None:
            return
        self._set_serving()
        reason = f"sampled from weights labelled {label!r}"
        logger.warning("%s %s: it is not used until it is proven again", name, reason)
        await self._report(Server(name, server.url, ServerState.JOINING, None, reason))

    def _set_serving(self) -> None:
        if self._router.serving:
            self._serving.set()
        else:
            self._serving.clear()
