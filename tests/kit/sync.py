"""Gives the tests of weight sync a transport without a data plane, provable snapshots, and a server to publish to.

The fake vLLM can prove these snapshots.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.weight_sync.fleet.server_publication import ServerSync
from slipstream.weight_sync.server.cancellation import gather
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import Engine
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import Sent, TransferError
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot
from tests.kit.fake_vllm import FakeVllm, serving
from tests.kit.fake_vllm.engine import logprob_of

PROBE_IDS = [3, 1, 4, 1, 5]

QUESTIONS = frozenset(
    {
        "/weight_info",
        "/get_world_size",
        "/is_paused",
        "/slipstream/score",
        "/slipstream/layers",
        "/slipstream/state",
        "/slipstream/facts",
    }
)

Send = Callable[[Snapshot], Coroutine[Any, Any, None]]


def probe(shift: float = 0.0) -> Probe:
    """Make the probe that the fake vLLM answers for `PROBE_IDS`, with each log-prob `shift` too high."""
    exact = [logprob_of(token, place) for place, token in enumerate(PROBE_IDS[1:], start=1)]
    return Probe(PROBE_IDS, np.array(exact, dtype=np.float32) + np.float32(shift))


def snapshot(version: int, shift: float = 0.0) -> Snapshot:
    """Make a snapshot of one tensor that holds `version` four times, with a probe that is `shift` too high."""
    return Snapshot(version, [("w", torch.full((4,), float(version)))], probe(shift))


class FakeTransport:
    """Sends nothing. It awaits `send` where a real transport would move the bytes.

    It calls vLLM's routes in the order of the gloo transport if `stages`, else in the order of vLLM's NCCL engine.
    """

    def __init__(self, send: Send, stages: bool = True) -> None:
        self.stages = stages
        self.workers = 0
        self.versions: list[int] = []
        self.sent: Sent | None = None
        self.closed = False
        self._send = send

    async def connect(self, server: Engine, workers: int) -> None:
        self.workers = workers
        await server.end_transfer()
        await server.init_transfer({"master_port": 1})

    async def publish(self, server: Engine, snapshot: Snapshot, pause: Pause) -> None:
        if self.closed:
            raise TransferError("the transport is closed")
        if self.stages:
            await server.start_update()
            await server.update(snapshot.manifest.as_dict())
            await self._send(snapshot)
            staged = await server.staged(1.0)
            if staged.stage != "ready":
                raise TransferError(f"the weights were not staged: {staged.error}")
            pause.seconds += (await server.swap(snapshot.label, pause.clear_cache)).pause_s
        else:
            async with pause.held():
                await server.start_update()
                await gather(server.update(snapshot.manifest.as_dict()), self._send(snapshot))
                await server.finish_update(snapshot.label)
        self.versions.append(snapshot.version)
        self.sent = Sent.of(snapshot)

    async def close(self) -> None:
        self.closed = True


class FakeTransports:
    """Makes transports and keeps them. A test may replace `send` at any time."""

    def __init__(self, stages: bool = True) -> None:
        self.made: list[FakeTransport] = []
        self.send: Send = nothing
        self._stages = stages

    def __call__(self) -> FakeTransport:
        self.made.append(FakeTransport(lambda snapshot: self.send(snapshot), self._stages))
        return self.made[-1]


async def nothing(snapshot: Snapshot) -> None:
    """Return at once; the default `send`."""


class Held:
    """Is a `send` that waits until a test calls `release`, from any thread."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self._released: Future[None] = Future()

    async def __call__(self, snapshot: Snapshot) -> None:
        self.began.set()
        await asyncio.shield(asyncio.wrap_future(self._released))

    def release(self) -> None:
        self._released.set_result(None)


@dataclass
class Rig:
    """Holds a fake server, its control, and the `ServerSync` that publishes to it."""

    fake: FakeVllm
    transports: FakeTransports
    control: ServerControl
    server: ServerSync


@asynccontextmanager
async def against(fake: FakeVllm, timeout_s: float = 1.0, stages: bool = True) -> AsyncIterator[Rig]:
    """Serve `fake`, ready for publications, inside the context.

    Args:
        fake: The server.
        timeout_s: Maximum seconds of each call to it.
        stages: Whether the transport has the order of the gloo transport.
    """
    transports = FakeTransports(stages)
    async with serving(fake) as url, ServerControl(url, timeout_s, run_id=lambda: "run-1") as control:
        yield Rig(fake, transports, control, ServerSync(control, transports, tolerance=1e-3))


def control_calls(fake: FakeVllm) -> list[str]:
    """Return the routes that were called, without those of `QUESTIONS`, which change nothing."""
    return [path for path in fake.calls if path not in QUESTIONS]
