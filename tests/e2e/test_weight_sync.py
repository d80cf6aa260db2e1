"""Weight sync against the real vLLM server: the staged engine, the swap, the proof, and what failures leave behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.fleet.server_publication import ServerSync
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.proof import ProofFailed
from slipstream.weight_sync.transports.base import TransferError, build_transport
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot, probe_token_ids
from tests.kit.engine_contract import CHECKS, RUN, VERSION

pytestmark = pytest.mark.e2e

PROBE_IDS = probe_token_ids(512)
TOLERANCE = 1e-3


def score(model: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probs of the probe by Hugging Face's model."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([PROBE_IDS])).logits[0, :-1], -1)
    return logprobs.gather(1, torch.tensor(PROBE_IDS[1:])[:, None])[:, 0].numpy()


def snapshot(model: Any, version: int) -> Snapshot:
    return Snapshot(version, model.named_parameters(), Probe(PROBE_IDS, score(model)))


def perturb(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def sync_of(control: ServerControl) -> ServerSync:
    section = WeightSyncSection(bucket_bytes=1 << 20, timeout_s=20)
    return ServerSync(control, lambda: build_transport(section), TOLERANCE)


@pytest.fixture
def model(model_folder: Path) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


@pytest.fixture
async def control(vllm_url: str) -> AsyncIterator[ServerControl]:
    async with ServerControl(vllm_url, timeout_s=30) as control:
        yield control


async def generate(url: str, tokens: int, choices: int, begun: asyncio.Event) -> dict[int, list[dict[str, Any]]]:
    """The chunks of each streamed choice; `begun` is set when the first has come."""
    body = {
        "token_ids": PROBE_IDS[:8],
        "sampling_params": {
            "n": choices,
            "max_tokens": tokens,
            "ignore_eos": True,
            "detokenize": False,
            "stream_interval": 100,
        },
        "output_mode": "tokens",
        "stream": True,
    }
    chunks: dict[int, list[dict[str, Any]]] = {}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/inference/v1/generate", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                for chunk in json.loads(line.removeprefix(b"data: "))["choices"]:
                    chunks.setdefault(chunk["index"], []).append(chunk)
                begun.set()
    return chunks


async def is_paused(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/is_paused") as response:
        return bool((await response.json())["is_paused"])


async def test_each_version_is_served_and_proven(control: ServerControl, model: Any) -> None:
    server = sync_of(control)
    for version in (1, 2, 3):
        perturb(model)
        outcome = await server.publish(snapshot(model, version))
        assert outcome.proof.max_abs_diff < TOLERANCE
        assert await control.weight_label() == str(version)
    await server.disconnect()


async def test_f3_an_update_lands_in_mid_generation_and_aborts_nothing(control: ServerControl, model: Any) -> None:
    server = sync_of(control)
    await server.publish(snapshot(model, 1))
    perturb(model)
    second = snapshot(model, 2)
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        # Many choices make each step of the engine slow enough for the update to land before the last.
        running = group.create_task(generate(control.url, 480, 96, begun))
        await begun.wait()
        await server.publish(second)
    assert len(running.result()) == 96
    for chunks in running.result().values():
        assert sum(len(chunk["token_ids"] or []) for chunk in chunks) == 480
        assert chunks[-1]["finish_reason"] == "length"
        first, last = chunks[-1]["weight_versions"]
        assert (first["version"], first["start"], first["end"]) == ("1", 0, last["start"])
        assert (last["version"], last["end"]) == ("2", 480)
    await server.disconnect()


async def test_a_server_with_other_weights_is_caught_by_the_probe_and_left_running(
    control: ServerControl, model: Any
) -> None:
    server = sync_of(control)
    wrong = snapshot(model, 7)
    wrong.probe.logprobs[5] += 0.01
    with pytest.raises(ProofFailed, match="version 7"):
        await server.publish(wrong)
    assert not await is_paused(control.url)
    assert (await server.publish(snapshot(model, 8))).proof.max_abs_diff < TOLERANCE
    await server.disconnect()


async def test_f2_weights_that_arrive_damaged_never_reach_the_model(control: ServerControl, model: Any) -> None:
    server = sync_of(control)
    await server.publish(snapshot(model, 1))
    before = await control.score_by_request(PROBE_IDS)
    perturb(model)
    damaged = snapshot(model, 2)
    damaged.__dict__["digest"] = bytes(16)
    with pytest.raises(TransferError, match="another digest"):
        await server.publish(damaged)
    assert await control.weight_label() == "1"
    assert np.array_equal(await control.score_by_request(PROBE_IDS), before)
    assert not await is_paused(control.url)
    assert (await server.publish(snapshot(model, 3))).proof.max_abs_diff < TOLERANCE
    await server.disconnect()


async def staged_alone(control: ServerControl, sent: Snapshot) -> Any:
    """All of a publication but the swap; gives the transport."""
    transport = build_transport(WeightSyncSection(transport="gloo", bucket_bytes=1 << 20, timeout_s=20))
    await transport.connect(control, 1)
    await control.start_update()
    await transport.bring(control, sent)  # type: ignore[attr-defined]
    assert (await control.staged(20)).stage == "ready"
    return transport


async def test_i6_a_learner_that_died_between_staging_and_swap_is_cleared_up_by_the_next(
    control: ServerControl, model: Any
) -> None:
    await sync_of(control).publish(snapshot(model, 1))
    before = await control.score_by_request(PROBE_IDS)
    perturb(model)
    await staged_alone(control, snapshot(model, 2))
    state = await control.state()
    assert (state.label, state.paused, state.whole, state.alive) == ("1", False, True, True)
    assert np.array_equal(await control.score_by_request(PROBE_IDS), before)
    successor = sync_of(control)
    perturb(model)
    assert (await successor.publish(snapshot(model, 3))).proof.max_abs_diff < TOLERANCE
    await successor.disconnect()


async def test_i6_a_swap_whose_client_went_away_is_made_and_labelled(control: ServerControl, model: Any) -> None:
    transport = await staged_alone(control, snapshot(model, 5))
    body = json.dumps({"label": "5", "clear_cache": True}).encode()
    port = int(control.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /slipstream/swap HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()
    await transport.close()
    for _ in range(100):
        if (await control.state()).label == "5":
            break
        await asyncio.sleep(0.1)
    state = await control.state()
    assert (state.label, state.paused, state.whole) == ("5", False, True)


async def test_i6_a_persons_pause_stands_through_a_swap(control: ServerControl, model: Any) -> None:
    perturb(model)
    sent = snapshot(model, 6)
    await post(control.url, "/pause?mode=keep")
    try:
        transport = await staged_alone(control, sent)
        await control.swap("6", clear_cache=True)
        state = await control.state()
        assert (state.label, state.paused, state.pause_owner) == ("6", True, "person")
    finally:
        await post(control.url, "/resume")
    assert not await is_paused(control.url)
    served = await control.score_by_request(PROBE_IDS)
    assert np.abs(served - sent.probe.logprobs).max() < TOLERANCE
    await transport.close()


async def test_p4_weights_are_labelled_by_the_swap_alone(control: ServerControl) -> None:
    assert await post(control.url, "/update_weight_version", {"new_version": "99"}) == 409
    assert await post(control.url, "/finish_weight_update", {"weight_version": "99"}) == 409
    assert await control.weight_label() != "99"


async def post(url: str, path: str, body: Any = None) -> int:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        return response.status


def without_a_layer(weights: dict[str, Any]) -> None:
    del weights["model.layers.0.mlp.down_proj.weight"]


def of_another_shape(weights: dict[str, Any]) -> None:
    weights["model.norm.weight"] = torch.ones(3)


def of_another_type(weights: dict[str, Any]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float16)


def with_a_stranger(weights: dict[str, Any]) -> None:
    weights["model.layers.0.mlp.stranger.weight"] = torch.ones(3, 3)


def half_a_fused_layer(weights: dict[str, Any]) -> None:
    del weights["model.layers.0.self_attn.k_proj.weight"]


@pytest.mark.parametrize(
    "spoil", [without_a_layer, of_another_shape, of_another_type, with_a_stranger, half_a_fused_layer]
)
async def test_p7_weights_that_are_not_the_models_leave_the_old_ones_untouched(
    spoil: Callable[[dict[str, Any]], None], control: ServerControl, model: Any
) -> None:
    server = sync_of(control)
    await server.publish(snapshot(model, 1))
    before = await control.score_by_request(PROBE_IDS)
    perturb(model)
    weights = dict(model.named_parameters())
    spoil(weights)
    with pytest.raises(TransferError, match="the weights were not staged"):
        await server.publish(Snapshot(2, weights.items(), Probe(PROBE_IDS, score(model))))
    assert await control.weight_label() == "1"
    assert np.array_equal(await control.score_by_request(PROBE_IDS), before)
    assert (await server.publish(snapshot(model, 3))).proof.max_abs_diff < TOLERANCE
    await server.disconnect()


async def test_vllm_keeps_the_contract_of_a_server_that_the_fake_keeps(control: ServerControl, model: Any) -> None:
    server = sync_of(control)
    sent = Snapshot(VERSION, model.named_parameters(), Probe(PROBE_IDS, score(model)), run_id=RUN)
    await server.publish(sent)
    await server.disconnect()
    for check in CHECKS.values():
        await check(control.url)
