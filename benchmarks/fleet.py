"""Measures the learner's time for the fleet: ten of twenty servers fail, or one of two servers stops.

    python -m benchmarks.fleet --json [--steps 40] [--step-ms 50] [--megabytes 16]

Fakes take the place of vLLM. The queue and its HTTP are real. No weights are sent.

publish_beside_copy_ms: Milliseconds that a publication blocks the learner, without the copy of the weights.
step_ratio: Median seconds of a step with one of two servers stopped for good, divided by those with both, by
    max_staleness.
longest_step_ratio: The longest of those steps divided by the median with both. The longest step contains the moment in
    which the queue finds the server stale.

Times on a shared machine differ from run to run: look at the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import torch

from slipstream.protocol import codec
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import BeginSession, Group, LeaseAck, LeaseRequest
from slipstream.weight_sync.publisher import Publisher
from tests.kit import config
from tests.kit.fake_vllm import FakeVllm, Fault, serving
from tests.kit.live_queue import LiveQueue, live_queue
from tests.kit.sync import FakeTransports, probe

T = TypeVar("T")

STOPPED = ("/slipstream/state", "/start_weight_update", "/update_weights", "/weight_info", "/get_world_size")


class Fakes:
    """Runs fake servers on a separate event loop in a separate thread."""

    def __init__(self, count: int) -> None:
        self.servers = [FakeVllm() for _ in range(count)]
        self.urls: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @contextmanager
    def up(self) -> Iterator[None]:
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            self.urls = [self.do(self._stack.enter_async_context(serving(server))) for server in self.servers]
            yield
        finally:
            self.do(self._stack.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(10)


@contextmanager
def running(fakes: Fakes, **sections: dict[str, Any]) -> Iterator[tuple[RunConfig, LiveQueue, Publisher]]:
    """Run a queue with a worker and a learner's session; yield the configuration, the queue and the publisher."""
    with tempfile.TemporaryDirectory() as folder, fakes.up():
        run = config(
            **{
                "vllm": {"servers": fakes.urls, "max_model_len": 64},
                "rollout": {"max_turn_tokens": 16},
                "run": {"dir": folder},
                **sections,
            }
        )
        with live_queue(run) as queue:
            begin = BeginSession(0, 0, 10_000, resume=False)
            session = queue.call(lambda client: client.begin_session(begin)).session
            with Publisher(run, queue.url, FakeTransports()) as publisher:
                publisher.session = session
                yield run, queue, publisher


def beside_copy_ms(megabytes: int, versions: int) -> dict[str, float]:
    """Measure how long a publication blocks the learner, with twenty servers of which ten fail at random.

    Args:
        megabytes: Size of the weights, MiB.
        versions: Number of publications.

    Returns:
        Median and maximum in milliseconds without the copy of the weights, and the number of overtaken versions.
    """
    fakes, chance = Fakes(20), random.Random(0)
    weights = [(f"w{i}", torch.randn(megabytes * 2**18 // 16)) for i in range(16)]
    held: list[float] = []
    with running(fakes) as (_, _, publisher):
        for version in range(versions):
            for server in fakes.servers[:10]:
                server.faults.clear()
                if chance.random() < 0.5:
                    server.faults.append(Fault("status", times=None, route=chance.choice(STOPPED)))
            began = time.perf_counter()
            publisher.publish(version, weights, probe())
            whole = time.perf_counter() - began
            began = time.perf_counter()
            _ = [tensor.clone() for _, tensor in weights]
            copied = time.perf_counter() - began
            held.append(1e3 * (whole - copied))
            if version == 0:
                publisher.wait()
            time.sleep(0.05)
        publisher.wait()
        skipped = sum(record.skipped for record in publisher.records)
    return {"p50": statistics.median(held), "max": max(held), "skipped": skipped}


def steps_s(max_staleness: int, steps: int, step_s: float, stop: bool) -> list[float]:
    """Measure the steps of a learner with two servers.

    Args:
        max_staleness: `queue.max_staleness` of the run.
        steps: Number of steps.
        step_s: Seconds that the learner computes in a step.
        stop: Stop one of the two servers after a quarter of the steps.

    Returns:
        Seconds of each step after the first quarter.
    """
    fakes, taken = Fakes(2), []
    with running(fakes, queue={"max_staleness": max_staleness}) as (run, queue, publisher):
        weights = [("w", torch.zeros(2**16))]
        publisher.publish(0, weights, probe())
        publisher.wait()
        for step in range(1, steps + 1):
            if stop and step == steps // 4:
                for route in STOPPED:
                    fakes.servers[1].faults.append(Fault("stop", times=None, route=route))
            began = time.perf_counter()
            _train(queue, run.learner.groups_per_step, step, step_s, publisher.session or 0)
            publisher.publish(step, weights, probe())
            taken.append(time.perf_counter() - began)
        fakes.servers[1].faults.clear()
    return taken[steps // 4 :]


def _train(queue: LiveQueue, groups: int, step: int, step_s: float, session: int) -> None:
    ids: list[str] = []
    while len(ids) < groups:
        have, wanted = list(ids), groups - len(ids)
        request = LeaseRequest(session, f"l{step}", wanted, have=have, wait_s=10.0)
        reply = queue.call(lambda client, request=request: client.lease(request))  # type: ignore[misc]
        ids += [codec.decode(bytes(group), Group).ticket_id for group in reply.groups]
    time.sleep(step_s)
    queue.call(lambda client: client.ack(f"l{step}", LeaseAck(session, ids, step=step, version=step)))


def stopped(steps: int, step_s: float, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Compare steps with one of two servers stopped to steps with both, by max_staleness."""
    found = {}
    for max_staleness in (0, 1, 4):
        both = steps_s(max_staleness, steps, step_s, stop=False)
        one = steps_s(max_staleness, steps, step_s, stop=True)
        median = statistics.median(both)
        found[str(max_staleness)] = {
            "step_ms": 1e3 * median,
            "step_ratio": statistics.median(one) / median,
            "mean_ratio": statistics.fmean(one) / statistics.fmean(both),
            "longest_step_ratio": max(one) / median,
        }
        say(f"K = {max_staleness}: {found[str(max_staleness)]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--megabytes", type=int, default=16)
    given = parser.parse_args()
    say: Callable[[str], None] = (lambda text: None) if given.json else print
    held = beside_copy_ms(given.megabytes, 30)
    say(f"publish next to the copy, 20 servers of which 10 fail: {held}")
    found = {"publish_beside_copy_ms": held, "stopped": stopped(given.steps, given.step_ms / 1e3, say)}
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
