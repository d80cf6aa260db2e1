"""Whether a run's servers take its adapter, asked once before the first publication.

What vLLM has no adapter for, such as layers of some architectures, only vLLM knows.
"""

from __future__ import annotations

import asyncio
import logging

from protocol.config import RunConfig
from weight_sync.fleet.adapter_publication import have_loaded
from weight_sync.server.cancellation import on_thread
from weight_sync.server.control import ControlError, ServerControl
from weight_sync.transports.base import TransferError
from weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)


def refusal(config: RunConfig, snapshot: Snapshot) -> str | None:
    """Why the first of the run's servers that answers does not take the adapter of `snapshot`. None: it does, or none
    answers within `vllm.start_timeout_s`, which is for the publication to say. Blocks."""
    return asyncio.run(_refusal(config, snapshot))


async def _refusal(config: RunConfig, snapshot: Snapshot) -> str | None:
    for asked in asyncio.as_completed([_asked(config, url, snapshot) for url in config.vllm.urls]):
        try:
            await asked
        except TransferError as error:
            return str(error)
        except ControlError as error:
            logger.info("not asked whether it takes adapters: %s", error)
            continue
        return None
    return None


async def _asked(config: RunConfig, url: str, snapshot: Snapshot) -> None:
    async with ServerControl(
        url, config.weight_sync.timeout_s, config.token_for("learner"), lambda: snapshot.run_id
    ) as control:
        await control.wait_until_up(config.vllm.start_timeout_s)
        payload = await on_thread(lambda: snapshot.adapter)
        assert payload is not None, "the snapshot is not an adapter's"
        await have_loaded(control, payload)
