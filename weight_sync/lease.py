"""The lease of a pause, renewed for as long as its owner lives (I6): a learner that dies leaves no server paused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weight_sync.server_control import ControlError, ServerControl

logger = logging.getLogger(__name__)

LEASE_S = 15.0


@asynccontextmanager
async def renewed(server: ServerControl, seconds: float = LEASE_S) -> AsyncIterator[None]:
    """Inside, the pause that this learner holds goes on; afterwards it ends in `seconds`, unless it is ended before."""

    async def renew() -> None:
        while True:
            try:
                await server.lease(seconds)
            except ControlError as error:
                # The publication fails by itself if the pause has ended.
                logger.warning("the lease of a pause was not renewed: %s", error)
            await asyncio.sleep(seconds / 3)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({renewing})
