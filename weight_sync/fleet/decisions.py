"""What is decided about a server that is brought up to date. Pure: no I/O, and time comes in as an argument.

A pause that a person asked for: nothing is published under it, and nothing sampled, until the person ends it.

The server leaves service, also if it is up to date, so that the work that waits there goes on elsewhere. When the pause
is over it is back without another publication: what was proven on it, it still holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from protocol.client import QueueRefused
from protocol.messages import PAUSED_BY_PERSON, ServerState
from weight_sync.fleet.queue_status import QueueReporter
from weight_sync.server.answers import EngineState

RETRY_PAUSE_S = 2.0

MAX_PAUSE_S = 60.0

# A server that is a version behind is not stale while it may only be a moment slower than the one that is ahead.
MIN_GRACE_S = 0.2


@dataclass(frozen=True)
class Standing:
    """A server as the others are measured by it: `version` it serves, and the seconds that the publication of it
    took."""

    name: str
    state: ServerState
    version: int | None
    took_s: float = 0.0


@dataclass(frozen=True)
class Behind:
    """`versions` by which a server is behind the newest; `ahead`: the server that is closest to it. Where that is
    `too_far`, and it has been behind for `grace_s` seconds, it is stale."""

    versions: int
    ahead: str
    grace_s: float
    too_far: bool


def behind(server: Standing, others: Iterable[Standing], newest: int, max_staleness: int) -> Behind | None:
    """Whether a serving server is behind another serving one. max(1, K) versions or more behind the `newest` that the
    learner has handed over, it would hold admission.

    It has as long again as the other one took, twice, before it leaves service: its requests would be given up for the
    sake of milliseconds.
    """
    if server.state is not ServerState.SERVING or server.version is None:
        return None
    serving = [of for of in others if of.state is ServerState.SERVING and of.version is not None]
    ahead = max(serving, key=lambda of: of.version or 0, default=None)
    if ahead is None or ahead.version is None or ahead.version <= server.version:
        return None
    versions = max(newest, ahead.version) - server.version
    grace_s = max(MIN_GRACE_S, 2 * ahead.took_s)
    return Behind(versions, ahead.name, grace_s, versions >= max(1, max_staleness))


def retry_pause_s(failures: int) -> float:
    """The pause after so many failures in a row; it doubles with each, up to a minute."""
    return min(MAX_PAUSE_S, RETRY_PAUSE_S * 2.0 ** max(0, min(failures, 30) - 1))


logger = logging.getLogger(__name__)

_S = ServerState


class UserPause:
    """`stands`: whether one did at the last look."""

    def __init__(self, at_queue: QueueReporter) -> None:
        self.stands = False
        self._at_queue = at_queue

    async def stands_in(self, state: EngineState) -> bool:
        """Whether the engine is paused by a person; then the queue is told (nobody could prove a publication)."""
        self.stands = state.paused and state.pause_owner == "person"
        if self.stands:
            if self._at_queue.server.state in (_S.JOINING, _S.DOWN):
                await self._at_queue.try_to_tell(_S.SYNCING)
            if self._at_queue.server.state in (_S.SYNCING, _S.SERVING, _S.STALE):
                await self._at_queue.try_to_tell(_S.STALE, None, f"{PAUSED_BY_PERSON}: waits for POST /resume")
        return self.stands

    def was_all(self, state: EngineState, label: str) -> bool:
        """Whether the server is out of service because of a pause alone, and holds the weights of this `label`."""
        server = self._at_queue.server
        was_paused = server.state is _S.STALE and (server.reason or "").startswith(PAUSED_BY_PERSON)
        return was_paused and state.label == label and state.whole

    async def ended(self, version: int) -> None:
        """Back into service with `version`, which is proven there: a pause changes no weights (I5)."""
        with suppress(QueueRefused):
            await self._at_queue.tell(_S.SYNCING)
            await self._at_queue.tell(_S.SERVING, version)
            logger.info("%s serves again: its pause was ended", self._at_queue.server.name)
