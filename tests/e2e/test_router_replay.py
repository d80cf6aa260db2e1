"""A mixture as it was sampled: the experts that a real vLLM chose reach the learner's forward pass.

vLLM records them in its second model runner alone, which runs on a CPU in Triton's interpreter (`tests/kit`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.deploy.servers import vllm_server
from slipstream.learner.feed.packing import Sample, pack_row
from slipstream.learner.feed.recorded_experts import RoutedLayers
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.protocol.config import ModelSection, RunConfig, load
from slipstream.protocol.messages import Segment, Server, ServerState
from slipstream.rollout_worker.episodes.episode import SegmentDraft
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.experts import known_until
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.inference.sampler import Sampler
from slipstream.weight_sync.server.control import ServerControl
from tests.e2e.conftest import EXAMPLE, IN_PROCESS, SCRIPT_LIMIT_S, wait_until_healthy
from tests.e2e.test_parallel_servers import mixture, snapshot
from tests.e2e.test_weight_sync import perturb, sync_of
from tests.kit.copies import ENVIRONMENT, ROOT
from tests.kit.ports import free_port
from tests.kit.second_runner import ENVIRONMENT as SECOND_RUNNER
from tests.kit.supervised import processes

pytestmark = pytest.mark.e2e

CLOSE = 1e-4

ENGINE = """
import sys
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, SamplingParams
from slipstream.learner.attention.experts import RouterReplay
from slipstream.learner.model.export import Published
from slipstream.weight_sync.vllm.engine import shadow, shadow_modules
from slipstream.weight_sync.vllm.engine.arrivals import Arrivals

folder = sys.argv[1]
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256, num_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=64, initializer_range=0.1, tie_word_embeddings=False)).eval()
model.save_pretrained(folder)
llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, skip_tokenizer_init=True, max_num_seqs=8,
          max_num_batched_tokens=64, kv_cache_memory_bytes=8_000_000, block_size=32,
          enable_return_routed_experts=True, worker_extension_cls="slipstream.weight_sync.vllm.worker.SlipstreamWorker")
engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
shadow_modules.install_torch_packing()
replay = RouterReplay(model, lambda: model(torch.arange(13)[None]), 13, {8})
prompts = {"begun": list(range(20)), "half": [token % 128 for token in range(100, 250)]}
ended = {}

def add(name, ids, start=0):
    params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, routed_experts_prompt_start=start)
    engine.add_request(name, {"prompt_token_ids": ids}, params)

def step():
    for request in engine.step():
        if request.finished:
            ended[request.request_id] = request

def choices(ids):
    with torch.no_grad(), replay.watching() as chosen:
        model(torch.tensor([ids]))
    return torch.stack(chosen, 1)

def same(one, other):
    return (one.sort(-1).values == other.sort(-1).values).all(-1).float().mean().item()

add("begun", prompts["begun"])
step()
add("half", prompts["half"])
step()
(half,) = [request for request in core.scheduler.running if not request.num_output_tokens]
assert 0 < half.num_computed_tokens < 150
add("waits", prompts["half"][:60])
before = choices(prompts["begun"])
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
weights = {name: tensor.clone() for name, tensor in Published(model)}
llm.apply_model(lambda served: shadow.build(served, engine.vllm_config, Arrivals.of(weights)).exchange())
core.set_weight_version("2")
while "half" not in ended:
    step()
add("cached", prompts["half"], start=40)
while len(ended) < 4:
    step()
assert ended["cached"].num_cached_tokens == 128
for name, request in ended.items():
    (output,) = request.outputs
    ids, start = list(request.prompt_token_ids) + list(output.token_ids), 40 if name == "cached" else 0
    recorded = torch.from_numpy(output.routed_experts).long()
    assert len(recorded) == len(ids) - 1 - start, (name, len(recorded))
    ours = choices(ids[:-1])[start:]
    if name == "begun":
        print("SAME", "begun before", same(recorded[:20], before), same(ours[:20], before))
    else:
        print("SAME", name, same(recorded, ours))
"""


@pytest.mark.wide
def test_experts_are_recorded_of_every_token_by_the_weights_that_computed_it(tmp_path: Path) -> None:
    """Where new weights come in the middle of a prompt, and where keys and values come from the prefix cache."""
    env = {**os.environ, **ENVIRONMENT, **SECOND_RUNNER, **IN_PROCESS}
    # No copy of a process that knows vLLM already: that one has looked for Triton.
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SCRIPT_LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout
    lines = [line.split() for line in printed.splitlines() if line.startswith("SAME")]
    shares = {line[1]: [float(word) for word in line[2:] if word != "before"] for line in lines}
    recorded_before, moved = shares.pop("begun")
    assert recorded_before == 1
    assert moved < 0.8, "the new weights choose other experts"
    assert shares == {"half": [1.0], "waits": [1.0], "cached": [1.0]}


def sample_of(segment: Segment, routed: RoutedLayers) -> Sample:
    weights = segment.loss_mask.astype(np.float32)
    ages = np.zeros(len(weights), np.int32)
    return Sample(segment.token_ids, segment.logprobs, weights, ages, segment.loss_mask, 0, experts=routed.of(segment))


@torch.no_grad()
def distance(policy: Policy, sample: Sample) -> float:
    """Mean of |log-prob of the learner - of the server| over the sampled tokens."""
    row = pack_row([sample]).to(policy.device)
    return float((policy(row).logprobs - row.behaviour).abs().mean())


async def turns(config: RunConfig, url: str, prompt: list[int]) -> list[SegmentDraft]:
    """Two episodes with a common first turn, the first of which continues after an answer of its tools."""
    server = Server("vllm-0", url, ServerState.SERVING, 1)

    async def report(_: Server) -> None:
        pytest.fail("the server was reported")

    async with InferenceClient(60.0) as client:
        pool = ServerPool(report, client.abort)
        pool.update([server])
        sampler = Sampler(client, pool, config, [511])
        affinities = [Affinity(), Affinity()]
        drafts = [SegmentDraft(prompt) for _ in affinities]
        first = sampler.first_turn(affinities, prompt, 12)
        for fill in first.fills:
            await fill
        for draft, affinity, pending in zip(drafts, affinities, first.pending, strict=True):
            draft.add([], await sampler.sample(affinity, prompt, 12, pending))
        answer = [7, 8, 9]
        draft = drafts[0]
        ids, known = [*draft.ids, *answer], known_until(draft.experts)
        draft.add(answer, await sampler.sample(affinities[0], ids, 12, known=known))
        return drafts


@pytest.fixture
def served(tmp_path: Path) -> Iterator[RunConfig]:
    """A run whose server, of a mixture, has been started."""
    folder = mixture(tmp_path / "mixture")
    flags = ["--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "8M", "--block-size", "32"]
    flags += ["--skip-tokenizer-init"]
    overrides = ["--model.path", str(folder), "--vllm.port", str(free_port()), "--vllm.args", json.dumps(flags)]
    overrides += ["--vllm.max_num_seqs", "4", "--vllm.max_model_len", "256", "--learner.router_replay", "true"]
    config = load(EXAMPLE / "run.toml", overrides)
    with processes(tmp_path) as started:
        env = vllm_server.environment(config) | {"OMP_NUM_THREADS": "1"} | SECOND_RUNNER
        started.start("vllm", *vllm_server.command(config, 0), env=env)
        wait_until_healthy(config.vllm.urls[0], started)
        yield config


async def test_the_learner_computes_with_the_experts_that_the_server_chose(served: RunConfig, tmp_path: Path) -> None:
    url, newer = served.vllm.urls[0], str(tmp_path / "newer")
    model = AutoModelForCausalLM.from_pretrained(served.model.path, dtype=torch.float32)
    perturb(model)
    model.save_pretrained(newer)
    policy = load_policy(newer, ModelSection(path=newer), Scoring(1.0, 16, replay=True))
    async with ServerControl(url, timeout_s=60) as control:
        sync = sync_of(control)
        await sync.publish(snapshot(model, 1))
        drafts = await turns(served, url, list(range(30, 70)))
        await sync.disconnect()
    assert policy.replay is not None
    samples = [sample_of(draft.segment(["vllm-0"]), policy.replay.routed) for draft in drafts]
    for sample in samples:
        assert sample.experts is not None
        assert (sample.experts[:-1] >= 0).all()
        assert (sample.experts[-1] == -1).all()
        with policy.replay.watching() as chosen:
            policy.score(sample.token_ids.tolist())
        ours = torch.stack(chosen, 1).numpy()
        assert (np.sort(sample.experts[:-1]) == np.sort(ours)).all()
        assert distance(policy, sample) < CLOSE
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "mlp.gate." in name:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.2)
    plain = replace(samples[0], experts=None)
    apart, without = distance(policy, samples[0]), distance(policy, plain)
    assert apart < 0.7 * without, (apart, without)
