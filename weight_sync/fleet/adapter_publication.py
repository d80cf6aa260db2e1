"""One version onto one server as an adapter: send, load, prove, and only then serve. No pause.

Bytes: each chunk's digest, the digest of the whole, which is a part of the adapter's name, and what vLLM's layers hold
of it. Computation: the probe under the adapter, before anybody is given it. The base under it is what the server loaded
itself from `model.path`, so the probe proves that as well.

Versions published as adapters alone: about a hundredth of the bytes, and no pause.

Whether a run's servers take its adapter, asked once before the first publication.

What vLLM has no adapter for, such as layers of some architectures, only vLLM knows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from protocol.config import RunConfig
from weight_sync.server.cancellation import on_thread
from weight_sync.server.control import ControlError, ServerControl
from weight_sync.server.proof import ProofFigures, ServerProof
from weight_sync.server.proof_rule import Floats
from weight_sync.transports.base import TransferError
from weight_sync.weights.snapshot import AdapterPayload, Snapshot

CHUNK_BYTES = 8 << 20

MERGED = "or have the merged weights published, with weight_sync.adapter_only = false"


class AdapterScores:
    """What the proof asks of `ServerControl`, asked of one loaded adapter."""

    def __init__(self, control: ServerControl, name: str) -> None:
        self.url = control.url
        self._control = control
        self._name = name

    async def score(self, sequences: list[list[int]]) -> list[Floats]:
        return await self._control.score_adapter(self._name, sequences)

    async def score_by_request(self, token_ids: list[int]) -> Floats:
        return await self._control.score_by_request(token_ids, self._name)

    async def layers(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._control.adapter_layers(self._name)


@dataclass(frozen=True)
class Served:
    """An adapter that serves now. `transfer_s`: seconds to send and load it, without its proof."""

    name: str
    transfer_s: float
    proof: ProofFigures


async def publish_adapter(control: ServerControl, snapshot: Snapshot, proof: ServerProof, proven: str | None) -> Served:
    """proven: the name of the adapter that was last proven on the server. Where the proof fails, the adapter is not
    served, and the one before goes on.

    Raises `ControlError`, `TransferError`, `ProofFailed`.
    """
    payload = await on_thread(lambda: snapshot.adapter)
    assert payload is not None, "the snapshot is not an adapter's"
    began = time.monotonic()
    state = await _state(control)
    before = state["served"]
    if before is not None:
        await proof.look(AdapterScores(control, before), snapshot, known=before == proven)
        began = time.monotonic()
    await have_loaded(control, payload, state)
    transfer_s = time.monotonic() - began
    figures = await proof.prove(AdapterScores(control, payload.name), snapshot)
    await control.serve_adapter(payload.name)
    return Served(payload.name, transfer_s, figures)


async def have_loaded(control: ServerControl, payload: AdapterPayload, state: dict[str, Any] | None = None) -> None:
    """Send the adapter and have it loaded, unless it is; it serves nobody yet. state: what the server said of its
    adapters, where it was asked.

    Raises `ControlError`, and `TransferError` where the server takes no adapter, or not this one.
    """
    if payload.name not in (state or await _state(control))["loaded"]:
        await _send(control, payload)
        await _load(control, payload)


async def _state(control: ServerControl) -> dict[str, Any]:
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


async def _load(control: ServerControl, payload: AdapterPayload) -> None:
    try:
        await control.load_adapter(payload.name, payload.config, payload.digest)
    except ControlError as error:
        if error.status != 422:
            raise
        raise TransferError(f"{error}; set [lora] to what vLLM serves, {MERGED}") from error


logger = logging.getLogger(__name__)


def adapter_refusal(config: RunConfig, snapshot: Snapshot) -> str | None:
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
