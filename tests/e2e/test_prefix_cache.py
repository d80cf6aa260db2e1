"""The prefix cache of the real vLLM server over a swap: a turn's label says what its tokens were computed by."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
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
from slipstream.weight_sync.transports.base import build_transport
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot, probe_token_ids

pytestmark = pytest.mark.e2e

PROBE_IDS = probe_token_ids(512)
VOCABULARY = 512
# The senders' prompts together are more than one step of the server takes, 4096 tokens.
SENDERS, PROMPT_TOKENS, TURN_TOKENS = 24, 300, 6
# Log-probs in float32, by two implementations; old keys and values are off by whole nats.
CLOSE = 1e-4


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    versions: list[str]


async def one_turn(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> Turn:
    """Asked for as a worker does that has not heard of the swap: the salt is of the version before."""
    params = {"max_tokens": TURN_TOKENS, "ignore_eos": True, "detokenize": False, "temperature": 1.0, "logprobs": 0}
    body = {"token_ids": prompt, "sampling_params": params, "output_mode": "tokens", "cache_salt": "run:1"}
    async with http.post(f"{url}/inference/v1/generate", json=body) as reply:
        assert reply.status == 200, await reply.text()
        (choice,) = (await reply.json())["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Turn(prompt, choice["token_ids"], logprobs, [span["version"] for span in choice["weight_versions"]])


async def turns_over(url: str, publication: Any) -> list[Turn]:
    """Turns of shared and of own prompts, from before the publication until a good while after it."""
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist() for _ in range(4)]
    turns: list[Turn] = []
    warm, published = asyncio.Event(), asyncio.Event()

    async def sender(number: int) -> None:
        after = 0
        for turn in itertools.count():
            if after == 3:
                return
            after += published.is_set()
            own = rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
            turns.append(await one_turn(http, url, own if number % 2 else shared[turn % len(shared)]))
            if len(turns) >= 3 * SENDERS:
                warm.set()

    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        for number in range(SENDERS):
            group.create_task(sender(number))
        await warm.wait()
        await publication
        published.set()
    return turns


def off_by(model: Any, turn: Turn) -> float:
    """How far the turn's log-probs are from the model's, at most."""
    ids = torch.tensor([turn.prompt + turn.sampled])
    with torch.no_grad():
        all_logprobs = torch.log_softmax(model(ids).logits[0, len(turn.prompt) - 1 : -1], -1)
    logprobs = all_logprobs.gather(1, torch.tensor(turn.sampled)[:, None])[:, 0]
    return float((logprobs - torch.tensor(turn.logprobs)).abs().max())


def snapshot(model: Any, version: int) -> Snapshot:
    ids = torch.tensor(PROBE_IDS)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    return Snapshot(version, model.named_parameters(), Probe(PROBE_IDS, logprobs.numpy()))


async def test_a_turn_that_is_labelled_with_the_new_version_alone_was_computed_by_it_alone(
    vllm_url: str, model_folder: Path
) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    section = WeightSyncSection(bucket_bytes=1 << 20, timeout_s=20)
    async with ServerControl(vllm_url, timeout_s=30) as control:
        sync = ServerSync(control, lambda: build_transport(section), 1e-3)
        await sync.publish(snapshot(model, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        turns = await turns_over(vllm_url, sync.publish(snapshot(model, 2)))
        await sync.disconnect()
    new = [turn for turn in turns if turn.versions == ["2"]]
    assert len(new) >= 2 * SENDERS
    errors = sorted((off_by(model, turn) for turn in new), reverse=True)
    far = [error for error in errors if error > CLOSE]
    assert not far, f"{len(far)} of {len(errors)} turns were computed in part by version 1: {far[:5]}"
