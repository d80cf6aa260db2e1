"""A pause that a person asked for: nothing is published under it, and nothing sampled, until the person ends it.

The server leaves service, also if it is up to date, so that the work that waits there goes on elsewhere. When the pause
is over it is back without another publication: what was proven on it, it still holds.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from protocol.client import QueueRefused
from protocol.messages import PAUSED_BY_PERSON, ServerState
from weight_sync.fleet.queue_status import QueueReporter
from weight_sync.server.answers import EngineState

logger = logging.getLogger(__name__)

_S = ServerState


class PersonsPause:
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
