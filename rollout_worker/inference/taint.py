"""Servers whose weights failed their proof: which of their tokens the queue will not take (I5).

It mirrors the queue's own rule (`rollout_queue.ledger.servers`) from the registry alone, so that an episode is not
carried on, and a group not handed in, for nothing. Where the registry's news came too late, the queue still refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.messages import Server, ServerState


@dataclass(slots=True)
class Taint:
    """Weights of `version` failed their proof on a server, and all that it served after them are doubted: up to version
    `until`, the first newer one that was proven there, and for episodes that were born before `proven_at`, when the
    server was proven again. None: not yet."""

    version: int
    until: int | None = None
    proven_at: int | None = None

    def covers(self, born: int | None) -> bool:
        return self.proven_at is None or born is None or born < self.proven_at


class Taints:
    """The taints of each server. `tick` counts the updates: it is the clock by which an episode is older or younger
    than a proof."""

    def __init__(self) -> None:
        self.tick = 0
        self._of: dict[str, list[Taint]] = {}

    @property
    def none(self) -> bool:
        """Whether no proof ever failed, as in most runs."""
        return not self._of

    def update(self, servers: Iterable[Server]) -> None:
        """Take the registry over."""
        self.tick += 1
        for server in servers:
            if server.version is None:
                continue
            if server.state is ServerState.QUARANTINED:
                self._failed(server.name, server.version)
            elif server.state is ServerState.SERVING:
                self._proven(server.name, server.version)

    def find(self, sampled: Iterable[tuple[str, int]], born: int | None) -> str | None:
        """The server, if any, of which an episode has a tainted token. `sampled`: its servers and versions."""
        if self.none:
            return None
        for name, version in sampled:
            for taint in self._of.get(name, ()):
                before_end = taint.until is None or version < taint.until
                if version >= taint.version and before_end and taint.covers(born):
                    return name
        return None

    def bars(self, name: str, version: int, born: int | None) -> bool:
        """Whether what the server, now at `version`, would sample for an episode could not be told from what is
        tainted: it was proven again at the version that had failed."""
        return any(
            taint.until is None and version >= taint.version and taint.covers(born) for taint in self._of.get(name, ())
        )

    def _failed(self, name: str, version: int) -> None:
        taints = self._of.setdefault(name, [])
        if not taints or taints[-1].proven_at is not None:  # else it is still the first failure that counts
            taints.append(Taint(version))

    def _proven(self, name: str, version: int) -> None:
        for taint in self._of.get(name, ()):
            if taint.proven_at is None:
                taint.proven_at = self.tick
            if taint.until is None and version > taint.version:
                taint.until = version
