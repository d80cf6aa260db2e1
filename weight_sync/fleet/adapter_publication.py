"""Publishes one version to one server as an adapter: send, load, prove, and only then serve.

An adapter is about a hundredth of the bytes and needs no pause. Its bytes are proven by a digest per chunk, a digest of
the whole (which is a part of its name), and what vLLM's layers hold of it; its computation by the probe under the
adapter, before anybody can ask for it. The server loaded the base from `model.path`, which the probe proves too.

Only vLLM knows for which layers it has adapters, so `adapter_refusal` asks a server before the first publication.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from blake3 import blake3

from slipstream.protocol.config import RunConfig
from slipstream.protocol.engine import AdaptersState, LayerFindings
from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.proof import ProofMetrics, ServerProof
from slipstream.weight_sync.server.proof_rule import Floats
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.weights.snapshot import AdapterPayload, Snapshot

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
REMEDY = "or have the merged weights published, with weight_sync.adapter_only = false"


class AdapterTarget:
    """Answers a proof's questions about a loaded adapter, as `ServerControl` does about the model: a `ProofTarget`."""

    def __init__(self, control: ServerControl, name: str) -> None:
        self.url = control.url
        self._control = control
        self._name = name

    async def score(self, sequences: list[list[int]]) -> list[Floats]:
        return await self._control.score_adapter(self._name, sequences)

    async def score_by_request(self, token_ids: list[int]) -> Floats:
        return await self._control.score_by_request(token_ids, self._name)

    async def layers(self, label: str) -> LayerFindings:
        return await self._control.adapter_layers(self._name)


@dataclass(frozen=True)
class AdapterOutcome:
    """An adapter that serves now.

    Attributes:
        transfer_s: Seconds to send and load it, without its proof.
    """

    name: str
    transfer_s: float
    proof: ProofMetrics


async def publish_adapter(
    control: ServerControl, snapshot: Snapshot, proof: ServerProof, proven: str | None
) -> AdapterOutcome:
    """Publish the adapter of `snapshot`. If its proof fails, the adapter before it continues serving.

    Args:
        proven: Name of the adapter that was last proven on the server, None before the first.

    Raises:
        ControlError: A call to the server failed.
        TransferError: The server takes no adapters, or not this one.
        ProofFailed: The server computes something else with it.
    """
    payload = await on_thread(lambda: snapshot.adapter)
    assert payload is not None, "the snapshot is not an adapter's"
    began = time.monotonic()
    state = await _adapters_state(control)
    before = state.served
    if before is not None:
        await proof.look(AdapterTarget(control, before), snapshot, known=before == proven)
        began = time.monotonic()
    await have_loaded(control, payload, state)
    transfer_s = time.monotonic() - began
    metrics = await proof.prove(AdapterTarget(control, payload.name), snapshot)
    await control.serve_adapter(payload.name)
    return AdapterOutcome(payload.name, transfer_s, metrics)


async def have_loaded(control: ServerControl, payload: AdapterPayload, state: AdaptersState | None = None) -> None:
    """Send the adapter and have it loaded, unless it is loaded. It serves nobody yet.

    Args:
        state: The server's answer about its adapters, None to ask for it.

    Raises:
        ControlError: A call to the server failed.
        TransferError: The server takes no adapters, or not this one.
    """
    if payload.name not in (state or await _adapters_state(control)).loaded:
        await _send(control, payload)
        await _load(control, payload)


async def _adapters_state(control: ServerControl) -> AdaptersState:
    try:
        state = await control.adapters()
    except ControlError as error:
        if error.status != 404:
            raise
        state = AdaptersState(enabled=False)
    if not state.enabled:
        raise TransferError(
            f"{control.url}: this server takes no adapters: start it with slipstream vllm run.toml and "
            f"weight_sync.adapter_only = true, which gives it --enable-lora, {REMEDY}"
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
        raise TransferError(f"{error}; set [lora] to what vLLM serves, {REMEDY}") from error


def adapter_refusal(config: RunConfig, snapshot: Snapshot) -> str | None:
    """Ask the run's servers whether they take the adapter of `snapshot`, until one answers. Blocks.

    Returns:
        Why that server does not take it. None if it does, or if none answers within `vllm.start_timeout_s`, which the
        publication reports.
    """
    return asyncio.run(_find_refusal(config, snapshot))


async def _find_refusal(config: RunConfig, snapshot: Snapshot) -> str | None:
    for asked in asyncio.as_completed([_try_load(config, url, snapshot) for url in config.vllm.urls]):
        try:
            await asked
        except TransferError as error:
            return str(error)
        except ControlError as error:
            logger.info("a server could not be asked whether it takes adapters: %s", error)
            continue
        return None
    return None


async def _try_load(config: RunConfig, url: str, snapshot: Snapshot) -> None:
    async with ServerControl(
        url, config.weight_sync.timeout_s, config.token_for("learner"), lambda: snapshot.run_id
    ) as control:
        await control.wait_until_up(config.vllm.start_timeout_s)
        payload = await on_thread(lambda: snapshot.adapter)
        assert payload is not None, "the snapshot is not an adapter's"
        await have_loaded(control, payload)
