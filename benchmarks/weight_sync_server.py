"""Runs the server of `benchmarks.weight_sync`: real vLLM on a CPU with a random model.

The load on it is eight generations that never end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.deploy.servers import vllm_server
from slipstream.protocol.config import RunConfig, load
from tests.kit.ports import free_port

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 240.0
GENERATIONS = 8
PROMPT = list(range(5, 21))
CONTEXT = 1024


@dataclass(frozen=True)
class Size:
    """Describes a Qwen3 of random weights: its shape, and the dtype in which it is served."""

    dtype: str
    shape: dict[str, Any]


def _shape(vocabulary: int, hidden: int, layers: int, heads: int, head_dim: int = 64, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **more,
    }


SIZES = {
    "1M": Size("float32", _shape(512, 128, 4, 4, 32, tie_word_embeddings=False)),
    "38M": Size("float32", _shape(8192, 512, 9, 8, tie_word_embeddings=False)),
    "200M": Size("float32", _shape(24576, 1024, 14, 16)),
    "460M": Size("bfloat16", _shape(20480, 1024, 28, 16, 128)),
}


def model_of(size: Size) -> Any:
    """Build the float32 master weights, the same at each call."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**size.shape)).eval()


@dataclass
class Server:
    """Holds a running server.

    Attributes:
        url: Address of the server.
        process: Its API process. The engine ends with it.
    """

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def serving(size: Size, model: Any, compared: bool = True) -> Iterator[Server]:
    """Start a server, and yield it while it still loads `model`.

    Prints the end of the server's log if the block fails.

    Args:
        size: Size of the model; its dtype is the server's.
        model: The model to serve.
        compared: Let the server do what `benchmarks.weight_sync_baseline` asks.
    """
    folder = Path(tempfile.mkdtemp(prefix="slipstream-bench-"))
    try:
        model.to(getattr(torch, size.dtype)).save_pretrained(folder / "model")
        model.to(torch.float32)
        (folder / "model" / "tokenizer_config.json").write_text("{}")
        config = _config(size, folder / "model", compared)
        environment = vllm_server.environment(config) | {"PYTHONPATH": str(ROOT)}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                vllm_server.command(config, 0), env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )
        try:
            url = f"http://127.0.0.1:{config.vllm.port}"
            yield Server(url, process)
        except BaseException:
            print((folder / "log").read_text(errors="replace")[-3000:], flush=True)
            raise
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _config(size: Size, model: Path, compared: bool) -> RunConfig:
    arguments = ["--skip-tokenizer-init", "--max-num-batched-tokens", "1024", "--kv-cache-memory-bytes", "1200M"]
    arguments += ["--block-size", "32"]
    if compared:
        arguments += ["--worker-extension-cls", "benchmarks.weight_sync_baseline.Worker"]
        arguments += ["--middleware", "tests.kit.collective_rpc.CollectiveRpc"]
    return load(
        ROOT / "examples" / "multiply" / "run.toml",
        [
            *("--model.path", str(model), "--model.dtype", size.dtype),
            *("--vllm.port", str(free_port()), "--vllm.max_model_len", str(CONTEXT)),
            *("--vllm.max_num_seqs", str(GENERATIONS), "--vllm.args", json.dumps(arguments)),
        ],
    )


@dataclass
class Load:
    """Holds the output of the generations.

    Attributes:
        arrivals: For each generation, the time (s, `time.perf_counter`) and the number of tokens of each chunk.
    """

    arrivals: list[list[tuple[float, int]]] = field(default_factory=lambda: [[] for _ in range(GENERATIONS)])

    def tokens(self, begins: float, ends: float) -> int:
        """Count the tokens that arrived between two moments (s)."""
        return sum(count for stream in self.arrivals for at, count in stream if begins <= at < ends)

    def gap_s(self, begins: float, ends: float) -> float:
        """Return the longest silence of all generations at once between two moments, seconds."""
        times = sorted(at for stream in self.arrivals for at, _ in stream if begins <= at < ends)
        return max((later - at for at, later in pairwise(times)), default=ends - begins)


@asynccontextmanager
async def under_load(url: str) -> AsyncIterator[Load]:
    """Run eight generations, and start each again when it ends. Enters the block when all have begun."""
    load = Load()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        tasks = [asyncio.create_task(_generate(session, url, arrivals)) for arrivals in load.arrivals]
        try:
            deadline = time.monotonic() + 120
            while not all(load.arrivals):
                if time.monotonic() > deadline or any(task.done() for task in tasks):
                    raise RuntimeError(f"{url}: the generations did not begin")
                await asyncio.sleep(0.05)
            yield load
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _generate(session: aiohttp.ClientSession, url: str, arrivals: list[tuple[float, int]]) -> None:
    sampling = {"max_tokens": CONTEXT - 64, "ignore_eos": True, "detokenize": False, "stream_interval": 4}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "output_mode": "tokens", "stream": True}
    while True:
        async with session.post(f"{url}/inference/v1/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line.removeprefix(b"data: "))["choices"]
                    count = sum(len(choice["token_ids"] or []) for choice in choices)
                    arrivals.append((time.perf_counter(), count))


def machine() -> dict[str, Any]:
    """Describe the machine and its current load."""
    return {
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "threads": torch.get_num_threads(),
    }
