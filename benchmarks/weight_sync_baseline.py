"""Implements the baselines of `benchmarks.weight_sync`, on the same server.

One is a raw gloo broadcast. The other loads new weights under a pause for the whole transfer, as vLLM's own engines and
TRL do it.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import aiohttp
import torch
import torch.distributed

from slipstream.weight_sync.server.cancellation import gather, on_thread
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.vllm.worker import SlipstreamWorker
from slipstream.weight_sync.weights.host_memory import Staging
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.snapshot import Snapshot

dist: Any = torch.distributed
HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=120)


class RawGroup:
    """Connects two ranks with nothing around them, and broadcasts all bytes in one call."""

    def __init__(self, rank: int, port: int) -> None:
        store = dist.TCPStore(HOST, port, 2, is_master=rank == 0, timeout=TIMEOUT)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = TIMEOUT
        options._threads = 2
        self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def broadcast(self, flat: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = TIMEOUT
        self._group.broadcast([flat], options).wait(TIMEOUT)

    def say_done(self) -> None:
        self._group.send([torch.zeros(1)], 0, 1).wait(TIMEOUT)

    def wait_for_done(self) -> None:
        self._group.recv([torch.zeros(1)], 1, 1).wait(TIMEOUT)


class Worker(SlipstreamWorker):
    """Receives at the vLLM worker: `--worker-extension-cls benchmarks.weight_sync_baseline.Worker`."""

    def slipstream_bench_join(self, port: int) -> None:
        self.slipstream_bench_group = RawGroup(1, port)
        self.slipstream_bench_buffer = Staging()

    def slipstream_bench_raw(self, size: int) -> None:
        """Receive `size` bytes on a thread, during generation."""

        def receive() -> None:
            group = self.slipstream_bench_group
            group.broadcast(self.slipstream_bench_buffer.take(size))
            group.say_done()

        threading.Thread(target=receive, daemon=True).start()

    def slipstream_bench_in_place(self, manifest: dict[str, Any]) -> None:
        """Receive and load into the live model in one call. Nothing else in the engine runs meanwhile."""
        from slipstream.weight_sync.vllm.engine.reload import load_staged

        layout = Manifest(**manifest)
        flat = self.slipstream_bench_buffer.take(layout.total_bytes())
        self.slipstream_bench_group.broadcast(flat)
        load_staged(self.model_runner.get_model(), self.model_config, layout.views(flat))  # type: ignore[attr-defined]


class Baseline:
    """Sends at the learner, and measures."""

    def __init__(self, control: ServerControl) -> None:
        self._control = control

    async def connect(self, port: int) -> None:
        joined = on_thread(RawGroup, 0, port)
        self._group, _ = await gather(joined, self._call("slipstream_bench_join", port))  # type: ignore[assignment]

    async def raw_s(self, snapshot: Snapshot) -> float:
        """Broadcast once into memory that was used before.

        Returns:
            Seconds until the receiver has confirmed it.
        """
        await self._call("slipstream_bench_raw", len(snapshot.flat))
        return await on_thread(self._raw_s, snapshot.flat)

    def _raw_s(self, flat: torch.Tensor) -> float:
        began = time.perf_counter()
        self._group.broadcast(flat)
        self._group.wait_for_done()
        return time.perf_counter() - began

    async def whole_pause_s(self, snapshot: Snapshot) -> float:
        """Pause, transfer and load all weights, and resume.

        Returns:
            Seconds from the call that pauses to the answer of the call that resumes.
        """
        began = time.perf_counter()
        await self._control.pause(False)
        try:
            await gather(
                self._call("slipstream_bench_in_place", snapshot.manifest.as_dict()),
                on_thread(self._group.broadcast, snapshot.flat),
            )
        finally:
            await self._control.resume()
        return time.perf_counter() - began

    async def _call(self, method: str, argument: Any) -> None:
        body = {"method": method, "args": [argument], "timeout": 120}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self._control.url}/collective_rpc", json=body) as response,
        ):
            if response.status != 200:
                raise RuntimeError(f"{method}: HTTP {response.status}: {(await response.text())[:500]}")
