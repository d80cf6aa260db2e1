"""One version onto one server as an adapter: send, load, prove, and only then serve. No pause.

Bytes: each chunk's digest, and the digest of the whole, which is a part of the adapter's name. Computation: the probe
under the adapter, before anybody is given it. The base under it is what the server loaded itself from `model.path`, so
the probe proves that as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weight_sync.adapters.payload import AdapterPayload
from weight_sync.cancellation import on_thread
from weight_sync.server_control import ControlError, ServerControl
from weight_sync.snapshot import Snapshot
from weight_sync.transports.base import TransferError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
MERGED = "or have the merged weights published, with weight_sync.adapter_only = false"


class AdapterScores:
    """What the proof asks a server of an adapter that it has loaded. `ServerControl`'s names."""

    def __init__(self, control: ServerControl, name: str) -> None:
        self.url = control.url
        self._control = control
        self._name = name
        self._by_request = False

    async def score(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Log-probs float32 [T-1] of `token_ids` [T] under the adapter: from the workers, or, where they cannot, by a
        request, which waits behind episodes. Raises `ControlError`."""
        try:
            return (await self._control.score_adapter(self._name, [token_ids]))[0]
        except ControlError as error:
            if error.status != 501:
                raise
            return await self._control.score_by_request(token_ids, self._name)


async def publish_adapter(
    control: ServerControl, snapshot: Snapshot, prove: Callable[[AdapterScores], Awaitable[float]]
) -> tuple[float, float]:
    """Seconds of the transfer, loading included, and what `prove` gave. `prove` raises where the server computes with
    other weights than the learner's; then the adapter is not served, and the one before goes on.

    Raises `ControlError`, `TransferError`.
    """
    payload = await on_thread(lambda: snapshot.adapter)
    assert payload is not None, "a snapshot of an adapter"
    began = time.monotonic()
    state = await _state(control)
    if payload.name not in state["loaded"]:
        await _send(control, payload)
        await _load(control, payload)
    sent_s = time.monotonic() - began
    figure = await prove(AdapterScores(control, payload.name))
    await control.serve_adapter(payload.name)
    return sent_s, figure


async def _state(control: ServerControl) -> dict[str, object]:
    try:
        state = await control.adapters()
    except ControlError as error:
        if error.status != 404:
            raise
        state = {"enabled": False}
    if not state["enabled"]:
        raise TransferError(
            f"{control.url}: this server takes no adapters: start it with slipstream vllm run.toml and "
            f"weight_sync.adapter_only = true, which gives it --enable-lora, {MERGED}"
        )
    return state


async def _send(control: ServerControl, payload: AdapterPayload) -> None:
    view = memoryview(payload.file)
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = bytes(view[start : start + CHUNK_BYTES])
        await control.put_adapter(payload.name, start, chunk, blake3(chunk).hexdigest())
        await asyncio.sleep(0)


async def _load(control: ServerControl, payload: AdapterPayload) -> None:
    try:
        await control.load_adapter(payload.name, payload.config, payload.digest)
    except ControlError as error:
        if error.status != 422:
            raise
        raise TransferError(f"{error}; set [lora] to what vLLM serves, {MERGED}") from error
