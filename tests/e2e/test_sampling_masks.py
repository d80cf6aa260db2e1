"""What top_k, top_p, min_p and bans leave of the policy is what the learner learns from, on a real vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.learner.feed.packing import Sample, SampledFrom, pack_row
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Scoring
from slipstream.protocol.config import ModelSection, load
from slipstream.protocol.messages import Segment, Server, ServerState
from slipstream.rollout_worker.agent.forced_calls import one_call
from slipstream.rollout_worker.episodes.episode import SegmentDraft
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.inference.sampler import Sampler
from slipstream.weight_sync.server.control import ServerControl
from tests.e2e.conftest import EXAMPLE
from tests.e2e.test_parallel_servers import snapshot
from tests.e2e.test_weight_sync import sync_of

pytestmark = pytest.mark.e2e

CLOSE = 1e-4
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALL = one_call({"f": ("<f>", "</f>")}, [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])
CASES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_p, top_k": {"top_k": 64, "top_p": 0.8},
    "min_p, top_k, temperature": {"top_k": 20, "min_p": 0.05, "temperature": 0.7},
    "bans": {"top_k": 20, "generation_kwargs": {"bad_words": ["1"], "min_tokens": 12}},
    "a grammar": {"top_k": 20, "generation_kwargs": {"structured_outputs": {"regex": "[0-9]{3}[a-z]{9}"}}},
    "a call": {"top_k": 20, "generation_kwargs": {"structured_outputs": {"structural_tag": CALL.structural_tag}}},
}


async def segment_of(url: str, model: Path, rollout: dict[str, Any]) -> tuple[Segment, float]:
    """A turn of 16 tokens after some ids, and the temperature."""
    config = load(EXAMPLE / "run.toml", ["--model.path", str(model)])
    section = config.rollout.model_validate({**config.rollout.model_dump(), **rollout})
    config = config.model_copy(update={"rollout": section})
    async with ServerControl(url, timeout_s=60) as control:
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        await sync_of(control).publish(snapshot(policy, 1))
    prompt = list(range(40, 60))

    async def report(server: Server) -> None:
        pytest.fail(f"{server.name} was reported")

    async with InferenceClient(60.0) as client:
        pool = ServerPool(report, client.abort)
        pool.update([Server("vllm-0", url, ServerState.SERVING, 1)])
        draft = SegmentDraft(prompt)
        draft.add([], await Sampler(client, pool, config, [511]).sample(Affinity(), prompt, 16))
    return draft.segment(["vllm-0"]), section.temperature


@pytest.mark.parametrize("name", CASES)
async def test_the_learner_s_log_probs_are_the_server_s(vllm_url: str, model_folder: Path, name: str) -> None:
    segment, temperature = await segment_of(vllm_url, model_folder, CASES[name])
    mask = segment.sampling_mask
    assert mask is not None
    assert mask.counts.max() <= CASES[name]["top_k"]
    policy = load_policy(str(model_folder), ModelSection(path=str(model_folder)), Scoring(temperature, 16))
    sampled, ages = segment.loss_mask, np.zeros(len(segment.token_ids), np.int32)
    sample = Sample(
        segment.token_ids, segment.logprobs, sampled.astype(np.float32), ages, sampled, 0, mask=SampledFrom.of(segment)
    )
    with torch.no_grad():
        row, unmasked = pack_row([sample]), pack_row([replace(sample, mask=None)])
        apart = float((policy(row).logprobs - row.behaviour).abs().max())
        plain = float((policy(unmasked).logprobs - row.behaviour).abs().max())
    assert apart < CLOSE
    assert plain > 10 * CLOSE, "the mask made no difference"
