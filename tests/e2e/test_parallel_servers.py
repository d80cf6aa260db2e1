"""Real servers of several workers or engines, with both of vLLM's model runners: each is published to and proven.

The second runner is the GPUs'. Here Triton's interpreter runs its kernels: see `tests/kit/second_runner`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slipstream.deploy.servers import vllm_server
from slipstream.learner.model.export import Published
from slipstream.protocol.config import load
from slipstream.weight_sync.fleet.server_publication import Outcome, ServerSync
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.proof import ProofFailed
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot
from tests.e2e.conftest import EXAMPLE, wait_until_healthy
from tests.e2e.test_weight_sync import PROBE_IDS, perturb, score, sync_of
from tests.kit.ports import free_port
from tests.kit.second_runner import ENVIRONMENT as SECOND_RUNNER
from tests.kit.supervised import processes

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-3
KIT = ["--worker-extension-cls", "tests.kit.vllm_worker.KitWorker"]
KIT += ["--middleware", "tests.kit.collective_rpc.CollectiveRpc"]
FLAGS = {
    "tensor": ["-tp", "2"],
    "pipeline": ["-pp", "2"],
    "data": ["-dp", "2"],
    "mixture": ["-dp", "2", "--skip-tokenizer-init"],
}


class Server(NamedTuple):
    """A server of the model in `folder`: `engines`, and `workers` of each; `runner`: the module of its model runner."""

    url: str
    folder: Path
    engines: int
    workers: int
    runner: str


@pytest.fixture
def server(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Iterator[Server]:
    kind, second = request.param
    flags = ["--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "8M", "--block-size", "32", *KIT]
    flags += FLAGS[kind]
    folder = mixture(tmp_path / "mixture") if kind == "mixture" else model_folder
    overrides = ["--model.path", str(folder), "--vllm.port", str(free_port()), "--vllm.args", json.dumps(flags)]
    config = load(EXAMPLE / "run.toml", [*overrides, "--vllm.max_num_seqs", "4", "--vllm.max_model_len", "256"])
    with processes(tmp_path) as started:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = vllm_server.environment(config) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        started.start("vllm", *vllm_server.command(config, 0), env=env | (SECOND_RUNNER if second else {}))
        wait_until_healthy(config.vllm.urls[0], started)
        engines = 2 if "-dp" in flags else 1
        runner = "vllm.v1.worker.cpu.model_runner" if second else "vllm.v1.worker.cpu_model_runner"
        yield Server(config.vllm.urls[0], folder, engines, 3 - engines, runner)


def mixture(folder: Path) -> Path:
    """Save a tiny mixture of experts in `folder`."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "initializer_range": 0.1}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(folder)
    return folder


def snapshot(model: Any, version: int) -> Snapshot:
    return Snapshot(version, Published(model), Probe(PROBE_IDS, score(model)))


async def ask(server: Server, method: str, *arguments: Any) -> list[dict[str, Any]]:
    """The answers of the first engine's workers; those of all engines do it."""
    body = {"method": method, "args": arguments}
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/collective_rpc", json=body) as response:
        assert response.status == 200, await response.text()
        return list((await response.json())["results"])


async def sample(url: str, engine: int, begun: asyncio.Event) -> list[str]:
    """Labels of a long continuation by an engine, in order; `begun` is set with its first token."""
    params = {"max_tokens": 200, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": PROBE_IDS[:8], "sampling_params": params, "output_mode": "tokens", "stream": True}
    spans: list[Any] = []
    path, headers = f"{url}/inference/v1/generate", {"X-data-parallel-rank": str(engine)}
    async with aiohttp.ClientSession() as session, session.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                spans = json.loads(line.removeprefix(b"data: "))["choices"][0].get("weight_versions") or spans
                begun.set()
    assert spans[-1]["end"] == 200
    return [span["version"] for span in spans]


async def publish_in_mid_generation(server: Server, sync: ServerSync, sent: Snapshot) -> Outcome:
    """Publish while every engine samples, and see that each one's tokens change their label once."""
    begun = [asyncio.Event() for _ in range(server.engines)]
    labels: list[list[str]] = [[] for _ in range(server.engines)]

    async def keep_sampling(engine: int) -> None:
        while str(sent.version) not in labels[engine]:
            labels[engine] += await sample(server.url, engine, begun[engine])

    async with asyncio.TaskGroup() as group:
        for engine in range(server.engines):
            group.create_task(keep_sampling(engine))
        for first in begun:
            await first.wait()
        outcome = await sync.publish(sent)
    for found in labels:
        assert list(dict.fromkeys(found)) == [str(sent.version - 1), str(sent.version)]
    return outcome


@pytest.mark.wide
@pytest.mark.parametrize(
    "server",
    [
        *[("tensor", False), ("data", False), ("mixture", False)],
        *[("tensor", True), ("pipeline", True), ("data", True), ("mixture", True)],
    ],
    indirect=True,
    ids=lambda of: f"{of[0]} parallel, {'second' if of[1] else 'first'} runner",
)
async def test_every_worker_of_a_parallel_server_is_published_to_and_proven(server: Server) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(server.folder, dtype=torch.float32)
    async with ServerControl(server.url, timeout_s=60) as control:
        state = await control.state()
        assert (state.alive, state.workers) == (True, server.engines * server.workers)
        sync = sync_of(control)
        await sync.publish(snapshot(model, 1))
        perturb(model)
        sent = snapshot(model, 2)
        await ask(server, "slipstream_count")
        outcome = await publish_in_mid_generation(server, sync, sent)
        for counts in await ask(server, "slipstream_counted"):
            assert counts["runner"] == server.runner
            assert counts["peak"] > counts["weights"] / 2
        assert outcome.proof.max_abs_diff < TOLERANCE
        assert outcome.proof.layers
        served = await control.score_by_request(PROBE_IDS)
        assert served.shape == (server.engines, len(PROBE_IDS) - 1)
        assert np.abs(served - sent.probe.logprobs).max() < TOLERANCE
        last = server.engines - 1, server.workers - 1
        await ask(server, "slipstream_damage", *last, 1e-6)
        named = f"engine {last[0]}" if server.engines > 1 else f"worker {last[1]}"
        with pytest.raises(ProofFailed, match=rf"do not hold what arrived: {named}: .*norm\.weight"):
            await sync.proof.prove(control, sent)
        await ask(server, "slipstream_damage", *last, 1.0)
        off = np.abs(await control.score_by_request(PROBE_IDS) - sent.probe.logprobs).max(axis=1)
        assert (off > TOLERANCE).tolist() == [*([False] * last[0]), True]
        perturb(model)
        assert (await sync.publish(snapshot(model, 3))).proof.max_abs_diff < TOLERANCE
        await sync.disconnect()
