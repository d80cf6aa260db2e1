"""The workers' ends of the transports for GPUs, over stand-ins: they stand behind a fake vLLM's routes."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.kit.fake_vllm.engine import EngineError, FakeEngine
from tests.kit.stand_in_nccl import Blocking, World, stand_in_gpu
from tests.weight_sync.receivers import Receiver
from weight_sync.server.cancellation import gather, on_thread
from weight_sync.transports.base import TransferError
from weight_sync.transports.gpu import ipc
from weight_sync.transports.gpu import nccl_receiver as nccl_staged
from weight_sync.transports.gpu.communicator import Gpu
from weight_sync.transports.gpu.nccl_receiver import chunks
from weight_sync.vllm.engine.staged_engine import Staging
from weight_sync.weights.manifest import Manifest
from weight_sync.weights.snapshot import Snapshot


class NcclReceiverEnd(Receiver):
    """Does what vLLM's NCCL engine does, in as many `workers`: packed, with calls that block as NCCL's do.

    `test_nccl_engine.py` drives that engine itself.
    """

    runs_here = True
    verifies = False

    def __init__(self, engine: FakeEngine, workers: int = 1) -> None:
        super().__init__(engine)
        self.world = World()
        self.groups: list[Blocking] = []
        self._workers = workers
        self._info: dict[str, Any] = {}
        engine.hooks |= {"init_weight_transfer_engine": self._join, "update_weights": self._receive}

    def gpu(self) -> Gpu:
        return stand_in_gpu(self.world)

    def close(self) -> None:
        for group in self.groups:
            group.destroy()

    def hang(self) -> None:
        self._engine.hooks["update_weights"] = self._never

    async def _never(self, update_info: dict[str, Any]) -> None:
        await asyncio.sleep(3600)

    async def _join(self, init_info: dict[str, Any]) -> None:
        self._info = init_info
        unique_id, size = base64.b64decode(init_info["nccl_unique_id_b64"]), init_info["world_size"]
        ranks = range(init_info["rank_offset"], init_info["rank_offset"] + self._workers)
        self.groups = await gather(*(on_thread(Blocking, self.world, unique_id, rank, size) for rank in ranks))

    async def _receive(self, update_info: dict[str, Any]) -> None:
        if not update_info:
            raise EngineError("Invalid update_info")
        assert self._engine.paused, "the model was touched beside generation"
        manifest = Manifest(update_info["names"], update_info["dtype_names"], update_info["shapes"])
        self.loaded += await gather(*(on_thread(self._unpack, group, manifest) for group in self.groups))

    def _unpack(self, group: Blocking, manifest: Manifest) -> dict[str, torch.Tensor]:
        views: dict[str, torch.Tensor] = {}
        places = {name: i for i, name in enumerate(manifest.names)}
        for chunk in chunks(manifest, self._info["packed_buffer_size_bytes"]):
            packed = torch.empty(chunk.size, dtype=torch.uint8)
            group.broadcast(packed, src=0)
            start = 0
            for name in chunk.names:
                i = places[name]
                dtype = getattr(torch, manifest.dtypes[i])
                end = start + dtype.itemsize * math.prod(manifest.shapes[i])
                views[name] = packed[start:end].view(dtype).view(manifest.shapes[i])
                start = end
        return views


class StagedReceiver(Receiver):
    """Does what a `DeviceEngine` does: its real reception, and the staging of `StagedEngine` in the host's memory."""

    runs_here = True
    learners_uuid = "GPU-0"
    own_uuid = "GPU-1"

    def __init__(self, engine: FakeEngine, workers: int = 1) -> None:
        super().__init__(engine)
        self.world = World()
        self.receptions: list[Any] = []
        self.stagings: list[Staging] = []
        self._workers = workers
        engine.hooks |= {
            "init_weight_transfer_engine": self._join,
            "update_weights": self._receive,
            "staged": self._look,
            "swap": self._load,
        }

    def gpu(self) -> Gpu:
        return stand_in_gpu(self.world, self.learners_uuid)

    def close(self) -> None:
        for reception in self.receptions:
            reception.close()

    def hang(self) -> None:
        self._engine.hooks["update_weights"] = self._never

    def _never(self, update_info: dict[str, Any]) -> None:
        self.stagings = []
        self._engine.staged = {"stage": "receiving", "error": None, "seconds": {}}

    def _joined(self, init_info: dict[str, Any], rank: int) -> Any:
        raise NotImplementedError

    def _arrivals(self, update_info: dict[str, Any]) -> list[Callable[[], dict[str, torch.Tensor]]]:
        raise NotImplementedError

    def _join(self, init_info: dict[str, Any]) -> None:
        self.close()
        try:
            self.receptions = [self._joined(init_info, rank) for rank in range(1, self._workers + 1)]
        except TransferError as error:
            raise EngineError(str(error)) from error

    def _receive(self, update_info: dict[str, Any]) -> None:
        self.stagings = [Staging(arrival, dict) for arrival in self._arrivals(update_info)]
        for staging in self.stagings:
            staging.start()

    async def _look(self, body: dict[str, Any]) -> None:
        for staging in self.stagings:
            await on_thread(staging.join, body["wait_s"])
        if not self.stagings:
            await asyncio.sleep(min(body["wait_s"], 0.1))
            return
        reports = [staging.report() for staging in self.stagings]
        self._engine.staged = next((report for report in reports if report["stage"] != "ready"), reports[0])

    def _load(self, body: Any) -> None:
        assert self._engine.paused, "the model was touched beside generation"
        self.loaded += [staging.shadow for staging in self.stagings]


class NcclStagedReceiver(StagedReceiver):
    """Behind a group of stand-ins."""

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world.damaged = 1

    def _joined(self, init_info: dict[str, Any], rank: int) -> Any:
        gpu = stand_in_gpu(self.world, self.own_uuid)
        return nccl_staged.NcclReceiver(gpu, nccl_staged.NcclInitInfo(**init_info), rank)

    def _arrivals(self, update_info: dict[str, Any]) -> list[Callable[[], dict[str, torch.Tensor]]]:
        manifest = Manifest(**update_info)
        return [
            partial(one.receive, manifest, torch.empty(manifest.total_bytes(), dtype=torch.uint8))
            for one in self.receptions
        ]


class IpcReceiverEnd(StagedReceiver):
    """With `SharedMemory` in the place of CUDA's handles."""

    own_uuid = "GPU-0"
    meets = False

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory.damaged = True

    def _joined(self, init_info: dict[str, Any], rank: int) -> Any:
        return ipc.IpcReceiver(stand_in_gpu(self.world, self.own_uuid), ipc.IpcInitInfo(**init_info))

    def _arrivals(self, update_info: dict[str, Any]) -> list[Callable[[], dict[str, torch.Tensor]]]:
        update = ipc.IpcUpdateInfo(**update_info)
        if self.memory.damaged:
            self.memory.damage()
        size = Manifest(**update.manifest).total_bytes()
        return [partial(one.receive, update, torch.empty(size, dtype=torch.uint8)) for one in self.receptions]
