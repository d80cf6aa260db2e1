"""`weight_sync.transport = "auto"`: which transport it is.

Who starts a server chooses by its machine (`transports.choice`); the learner asks each server what it has and takes
the same, so that the two ends cannot differ.
"""

from __future__ import annotations

import logging

from protocol.config import WeightSyncSection
from weight_sync.server.control import ServerControl
from weight_sync.server.pause import Pause
from weight_sync.transports.base import Sent, TransferError, Transport
from weight_sync.transports.registry import SEND_DELTAS, build_transport, of_backend
from weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)


class AutoTransport:
    """See `base.Transport`. Becomes, with `connect`, the one that the server was started with."""

    # As all that is chosen does, but for quantised servers, for which the run file has to say it.
    stages = True

    def __init__(self, section: WeightSyncSection) -> None:
        self._section = section
        self._chosen: Transport | None = None

    @property
    def sent(self) -> Sent | None:
        return self._chosen.sent if self._chosen is not None else None

    async def connect(self, server: ServerControl, workers: int) -> None:
        found = (await server.state()).transport
        name = of_backend(found)
        if name is None:
            raise TransferError(
                f"{server.url}: its weight transfer is {found or 'off'}, which Slipstream does not know; start it with "
                f"slipstream vllm run.toml"
            )
        chosen = build_transport(self._section.model_copy(update={"transport": name}))
        if not chosen.stages:
            raise TransferError(
                f"{server.url} loads weights under the pause ({name}), which is not chosen by itself: set "
                f"weight_sync.transport = {name}"
            )
        if self._section.delta and name not in SEND_DELTAS:
            logger.warning(
                "%s: weight_sync.delta = true, and %s, which the server was started with, sends everything; start the "
                "servers with weight_sync.transport = http, or leave delta out",
                *(server.url, name),
            )
        logger.info("%s: weights travel by %s, which the server was started with", server.url, name)
        self._chosen = chosen
        await chosen.connect(server, workers)

    async def publish(self, server: ServerControl, snapshot: Snapshot, pause: Pause) -> None:
        if self._chosen is None:
            raise TransferError("the transport is not connected")
        await self._chosen.publish(server, snapshot, pause)

    async def close(self) -> None:
        if self._chosen is not None:
            await self._chosen.close()
