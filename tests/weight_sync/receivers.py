"""The workers' ends of the transports, real but for vLLM: they stand behind a fake vLLM's routes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch

from tests.kit.fake_vllm.engine import FakeEngine
from tests.kit.stand_in_nccl import SharedMemory
from weight_sync.server.cancellation import gather, on_thread
from weight_sync.transports.gloo.group import GlooGroup, GlooInitInfo
from weight_sync.transports.gloo.receiver import GlooReceiver as GlooReceiver
from weight_sync.transports.gloo.receiver import GlooUpdateInfo
from weight_sync.transports.gpu.communicator import Gpu
from weight_sync.transports.http.blob_server import BlobServer
from weight_sync.transports.http.receiver import HttpInitInfo, HttpReceiver, HttpUpdateInfo
from weight_sync.vllm.engine.staged_engine import Staging
from weight_sync.weights.snapshot import Snapshot


class Receiver:
    """Becomes the hooks of `engine`. This one receives nothing: it stands for an end that runs only on a GPU.

    `loaded`: what reached the model of each worker at each publication, by name.
    """

    runs_here = False
    # Whether what arrives damaged is refused before the model is touched; else the proof finds it.
    verifies = True
    # Whether both ends come together when they are connected.
    meets = True

    def __init__(self, engine: FakeEngine) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.memory = SharedMemory()
        self._engine = engine

    def hang(self) -> None:
        """Receive nothing from now on, while the server answers as far as it can without."""

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the bytes of `sent` not be what they are said to be."""
        sent.__dict__["digest"] = bytes(16)

    def gpu(self) -> Gpu:
        """The learner's end, where it needs one."""
        raise AssertionError("a transport for CPUs asked for a GPU")

    def close(self) -> None:
        """Let go of what a peer that is gone would be waited for."""


class GlooReceiverEnd(Receiver):
    """Does what `GlooEngine` does, in as many `workers`."""

    runs_here = True

    def __init__(self, engine: FakeEngine, workers: int = 1) -> None:
        super().__init__(engine)
        self.groups: list[GlooGroup] = []
        self.receptions: list[GlooReceiver] = []
        self.updates: list[GlooUpdateInfo] = []
        self.stagings: list[Staging] = []
        self._workers = workers
        self._timeout_s = 0.0
        engine.hooks |= {
            "init_weight_transfer_engine": self._join,
            "update_weights": self._receive,
            "staged": self._look,
            "swap": self._load,
        }

    def hang(self) -> None:
        self._engine.hooks["update_weights"] = lambda update_info: None

    async def _join(self, init_info: dict[str, Any]) -> None:
        info = GlooInitInfo(**init_info)
        self._timeout_s = info.timeout_s
        ranks = range(1, self._workers + 1)
        self.groups = await gather(*(on_thread(GlooGroup.join, info, rank) for rank in ranks))
        self.receptions = [GlooReceiver(group) for group in self.groups]

    def _receive(self, update_info: dict[str, Any]) -> None:
        info = GlooUpdateInfo(**update_info)
        self.updates.append(info)
        self.stagings = [Staging(partial(reception.receive, info), _copied) for reception in self.receptions]
        for staging in self.stagings:
            staging.start()

    async def _look(self, body: Any) -> None:
        for staging in self.stagings:
            await on_thread(staging.join, self._timeout_s)
        reports = [staging.report() for staging in self.stagings]
        self._engine.staged = next((report for report in reports if report["stage"] != "ready"), reports[0])

    def _load(self, body: Any) -> None:
        assert self._engine.paused, "the model was touched beside generation"
        self.loaded += [staging.shadow for staging in self.stagings]


class HttpReceiverEnd(Receiver):
    """Does what `HttpEngine` does, in as many `workers`."""

    runs_here = True

    def __init__(self, engine: FakeEngine, workers: int = 1) -> None:
        super().__init__(engine)
        self.receptions: list[HttpReceiver] = []
        self.stagings: list[Staging] = []
        self.updates: list[HttpUpdateInfo] = []
        self._workers = workers
        engine.hooks |= {
            "init_weight_transfer_engine": self._join,
            "update_weights": self._receive,
            "staged": self._look,
            "swap": self._load,
        }

    def hang(self) -> None:
        self.stagings = []
        self._engine.hooks["update_weights"] = lambda update_info: None

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        put = BlobServer.put

        def damaged(depot: BlobServer, flat: torch.Tensor) -> str:
            other = flat.clone()
            other[len(other) // 2] ^= 1
            return put(depot, other)

        monkeypatch.setattr(BlobServer, "put", damaged)

    async def _join(self, init_info: dict[str, Any]) -> None:
        for reception in self.receptions:
            reception.close()
        self.receptions = [HttpReceiver(HttpInitInfo(**init_info)) for _ in range(self._workers)]
        await gather(*(on_thread(reception.greet) for reception in self.receptions))

    def _receive(self, update_info: dict[str, Any]) -> None:
        info = HttpUpdateInfo(**update_info)
        self.updates.append(info)
        self.stagings = [Staging(partial(reception.receive, info), _copied) for reception in self.receptions]
        for staging in self.stagings:
            staging.start()

    async def _look(self, body: Any) -> None:
        if not self.stagings:
            self._engine.staged = {"stage": "receiving", "error": None, "seconds": {}}
            await asyncio.sleep(0.1)
            return
        for staging in self.stagings:
            await on_thread(staging.join, 20)
        reports = [staging.report() for staging in self.stagings]
        self._engine.staged = next((report for report in reports if report["stage"] != "ready"), reports[0])

    def _load(self, body: Any) -> None:
        assert self._engine.paused, "the model was touched beside generation"
        self.loaded += [staging.shadow for staging in self.stagings]


def _copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a shadow is built: the memory is received into again."""
    return {name: tensor.clone() for name, tensor in weights.items()}
