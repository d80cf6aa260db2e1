"""Measures how much faster ranks publish together: each sends its share, against one that sends everything.

    python -m benchmarks.share_publication [--json] [--millions 200] [--ranks 1 4] [--rounds 5] [--transport gloo]

Ranks and the server's worker are processes of one machine, and weights are random. Each round publishes a new version;
the first maps the memory and does not count. A server of one worker stands behind a fake vLLM.

snapshot_s: Seconds of the longest copy of a share, which the learner waits for.
publish_s: Seconds until the worker has received and verified all shares.
host_bytes: The most bytes that a rank holds of one version, divided by those of the whole.
copy_s: Seconds of a plain copy of all bytes, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import queue
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.ranks.follower import ShareFollower
from slipstream.weight_sync.ranks.leader import FollowingRanks
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import build_transport
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot
from tests.kit import config as run_config
from tests.kit.fake_vllm import FakeVllm, serving

TENSORS = 48
NOTHING = Probe([], np.zeros(0, dtype=np.float32))


class Pipe:
    """A channel between processes."""

    def __init__(self, end: Connection) -> None:
        self._end = end
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        with self._lock:
            self._end.send_bytes(message)

    def receive(self) -> bytes:
        try:
            return self._end.recv_bytes()
        except (EOFError, OSError) as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        self._end.close()


def share(millions: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    rows = millions * 1_000_000 // TENSORS // 1000
    return {f"layers.{i}.weight": torch.full((rows, 1000), float(i)) for i in range(rank, TENSORS, ranks)}


def follow(steps: Connection, calls: Connection, section: dict[str, Any], millions: int, rank: int, ranks: int) -> None:
    """Run a rank other than 0: fill a share at each step."""
    torch.set_num_threads(1)
    config = run_config().model_copy(update={"weight_sync": WeightSyncSection(**section)})
    weights = share(millions, rank, ranks)
    with ShareFollower(config, Pipe(calls), rank) as follower:
        while (told := steps.recv()) is not None:
            began = time.perf_counter()
            follower.fill(told, weights.items())
            steps.send(time.perf_counter() - began)


def receive(pipe: Connection) -> None:
    """Run the server's worker, as `StagedEngine` does without a model."""
    from importlib import import_module

    from slipstream.weight_sync.transports.receiver import Worker, of_one_version
    from slipstream.weight_sync.transports.registry import TRANSPORTS

    torch.set_num_threads(1)
    receivers: list[Any] = []
    while (order := pipe.recv()) is not None:
        what, name, infos = order
        if what == "join":
            module, _, cls = TRANSPORTS[name].worker.partition(":")
            make = getattr(import_module(module), cls)
            receivers = [make(info, Worker(1, torch.device("cpu"))) for info in infos]
        else:
            infos = of_one_version(infos)
            threads = [
                threading.Thread(target=lambda one=one, info=info: list(one.receive(info).pieces))
                for one, info in zip(receivers, infos, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        pipe.send(what)


async def case(transport: str, millions: int, ranks: int, rounds: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    section = {"transport": transport, "timeout_s": 120}
    worker, theirs = context.Pipe()
    processes = [context.Process(target=receive, args=(theirs,), daemon=True)]
    steps, calls = [], []
    for rank in range(1, ranks):
        (own_step, their_step), (own_call, their_call) = context.Pipe(), context.Pipe()
        arguments = (their_step, their_call, section, millions, rank, ranks)
        processes.append(context.Process(target=follow, args=arguments, daemon=True))
        steps.append(own_step)
        calls.append(own_call)
    for process in processes:
        process.start()
    fake, answers = FakeVllm(), queue.Queue[str]()

    async def order(what: str, body: dict[str, Any]) -> None:
        worker.send((what, transport, body["shares"]))
        if what == "join":
            await asyncio.to_thread(worker.recv)
        else:
            threading.Thread(target=lambda: answers.put(worker.recv()), daemon=True).start()

    async def staged(body: dict[str, Any]) -> None:
        await asyncio.to_thread(answers.get)
        fake.engine.staged = {"stage": "ready", "error": None, "seconds": {}}

    fake.engine.hooks |= {
        "init_weight_transfer_engine": lambda body: order("join", body),
        "update_weights": lambda body: order("receive", body),
        "staged": staged,
    }
    own = share(millions, 0, ranks)
    others = FollowingRanks([Pipe(call) for call in calls])
    sender = build_transport(WeightSyncSection(**section), others.senders)
    copy_s, snapshot_s, publish_s, most = [], [], [], 0
    buffer: torch.Tensor | None = None
    async with serving(fake) as url, ServerControl(url, 120) as control:
        await sender.connect(control, 1)
        for version in range(rounds + 1):
            told = {"version": version, "kept": [], "run": ""}
            for step in steps:
                step.send(told)
            began = time.perf_counter()
            sent = Snapshot(version, own.items(), NOTHING, None, buffer)
            buffer, filled = sent.flat, [time.perf_counter() - began]
            filled += [step.recv() for step in steps]
            most = max(most, len(sent.flat))
            began = time.perf_counter()
            await sender.publish(control, sent, Pause(control, False, True))
            if version:
                snapshot_s.append(max(filled))
                publish_s.append(time.perf_counter() - began)
        await sender.close()
    whole = sender.sent.whole_bytes if sender.sent is not None else 0
    source = torch.zeros(whole, dtype=torch.uint8)
    target = torch.empty_like(source)
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(source)
        copy_s.append(time.perf_counter() - began)
    for pipe in (*steps, worker):
        pipe.send(None)
    for process in processes:
        process.join(20)
        process.kill()
    return {
        "transport": transport,
        "ranks": ranks,
        "bytes": whole,
        "snapshot_s": statistics.median(snapshot_s),
        "publish_s": statistics.median(publish_s),
        "host_bytes": most / whole,
        "copy_s": min(copy_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--millions", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", nargs="+", default=["gloo"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for transport in given.transport:
        for ranks in given.ranks:
            found = asyncio.run(case(transport, given.millions, ranks, given.rounds))
            print(
                json.dumps(found)
                if given.json
                else "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in found.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
