"""Measures the learner's step times with two servers, and with one of the two stopped so that it answers nothing.

    python -m benchmarks.weight_sync_stopped --json [--steps 12]

Uses two real vLLM servers on a CPU, a real queue, and a learner that makes a step of some arithmetic and a publication.

step_ratio: Median step with one server stopped (SIGSTOP, from the first of these steps on), divided by the median with
    both.
longest_s: Seconds of the longest of those steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
import uvicorn

from benchmarks.weight_sync_server import SIZES, START_TIMEOUT_S, Server, machine, model_of, serving
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import BeginSession
from slipstream.protocol.messages import Server as Registered
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.store.memory import MemoryStore
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.weights.snapshot import Probe, probe_token_ids
from tests.kit import config as kit_config

SIZE = "1M"
# Of 512 x 512 matrices: about 0.3 s on one core.
PRODUCTS = 60


@contextmanager
def queue_of(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Run a queue that knows the run file's servers; yield its URL and the learner's session."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(create_app(config, MemoryStore()), log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([listener])), daemon=True)
    thread.start()
    try:
        yield url, asyncio.run(_begun(url, config.vllm.servers))
    finally:
        server.should_exit = True
        thread.join(10)


async def _begun(url: str, servers: list[str]) -> int:
    async with QueueClient(url, patience_s=20) as queue:
        for index, at in enumerate(servers):
            await queue.put_server(Registered(f"vllm-{index}", at))
        return (await queue.begin_session(BeginSession(0, 0, 10_000, resume=False))).session


class Learner:
    """Makes steps of some arithmetic and a publication.

    `steps(n)` returns the seconds of each of n steps, publication included.
    """

    def __init__(self, publisher: Publisher, model: Any) -> None:
        self._publisher = publisher
        self._model = model
        self._version = 0
        self._matrix = torch.randn(512, 512)

    def steps(self, count: int) -> list[float]:
        return [self._step() for _ in range(count)]

    @torch.no_grad()
    def _step(self) -> float:
        began = time.perf_counter()
        product = self._matrix
        for _ in range(PRODUCTS):
            product = torch.tanh(product @ self._matrix)
        self._version += 1
        for parameter in self._model.parameters():
            parameter.mul_(1.01 if self._version % 2 else 1 / 1.01)
        ids = probe_token_ids(SIZES[SIZE].shape["vocab_size"])
        logprobs = torch.log_softmax(self._model(torch.tensor([ids])).logits[0, :-1], -1)
        probe = Probe(ids, logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
        self._publisher.publish(self._version, self._model.named_parameters(), probe)
        return time.perf_counter() - began


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Stop the server's processes inside the block."""
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def measured(steps: int) -> dict[str, Any]:
    model = model_of(SIZES[SIZE])
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(SIZES[SIZE], model, compared=False)) for _ in range(2)]
        urls = [server.url for server in servers]
        config = kit_config(
            vllm={"servers": urls, "start_timeout_s": START_TIMEOUT_S},
            weight_sync={"timeout_s": 60.0},
            queue={"max_staleness": 1},
        )
        url, session = stack.enter_context(queue_of(config))
        publisher = stack.enter_context(Publisher(config, url))
        publisher.session = session
        learner = Learner(publisher, model)
        learner.steps(1)
        publisher.wait()
        learner.steps(3)  # Warms up.
        both = learner.steps(steps)
        with stopped(servers[1]):
            one = learner.steps(steps)
    return {
        "step_ratio": round(statistics.median(one) / statistics.median(both), 3),
        "both_s": round(statistics.median(both), 4),
        "one_stopped_s": round(statistics.median(one), 4),
        "longest_s": round(max(one), 4),
        "longest_both_s": round(max(both), 4),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a line")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    figures = measured(arguments.steps)
    print(json.dumps(figures, indent=2) if arguments.json else figures)


if __name__ == "__main__":
    main()
