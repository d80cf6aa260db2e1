"""The workers' ends of the transports, real but for vLLM and GPUs: they stand behind a fake vLLM's routes."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch

from slipstream.weight_sync.server.cancellation import gather, on_thread
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.gpu.communicator import Gpu
from slipstream.weight_sync.transports.gpu.nccl_receiver import chunks
from slipstream.weight_sync.transports.http.blob_server import BlobServer
from slipstream.weight_sync.transports.receiver import Receiver, Share, Worker, of_one_version
from slipstream.weight_sync.transports.registry import TRANSPORTS
from slipstream.weight_sync.vllm.engine.staged_engine import Staging
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.parts import Part, joined
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.fake_vllm.engine import EngineError, FakeEngine
from tests.kit.stand_in_nccl import Blocking, SharedMemory, World, stand_in_gpu


class ReceivingEnd:
    """Becomes the hooks of `engine`, for as many `workers`.

    `loaded`: what reached the model of each worker at each publication, by name.
    """

    # Whether what arrives damaged is refused before the model is touched; else the proof finds it.
    verifies = True
    # Whether both ends come together when they are connected.
    meets = True

    def __init__(self, engine: FakeEngine, workers: int = 1) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.memory = SharedMemory()
        self.world = World()
        self._engine = engine
        self.workers = workers

    def hang(self) -> None:
        """Receive nothing from now on, while the server answers as far as it can without."""

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the bytes of `sent` not be what they are said to be."""

    def gpu(self, device: torch.device | None = None) -> Gpu:
        """The GPU of the learner, or of a worker on `device`."""
        raise AssertionError("a transport for CPUs asked for a GPU")

    def close(self) -> None:
        """Let go of what a peer that is gone would be waited for."""


class NcclEnd(ReceivingEnd):
    """Does what vLLM's NCCL engine does: packed, with calls that block as NCCL's do.

    `test_nccl_engine.py` drives that engine itself.
    """

    verifies = False

    def __init__(self, engine: FakeEngine, workers: int = 1) -> None:
        super().__init__(engine, workers)
        self.groups: list[Blocking] = []
        self._info: dict[str, Any] = {}
        engine.hooks |= {"init_weight_transfer_engine": self._join, "update_weights": self._receive}

    def gpu(self, device: torch.device | None = None) -> Gpu:
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
        ranks = range(init_info["rank_offset"], init_info["rank_offset"] + self.workers)
        self.groups = await gather(*(on_thread(Blocking, self.world, unique_id, rank, size) for rank in ranks))

    async def _receive(self, update_info: dict[str, Any]) -> None:
        if not update_info:
            raise EngineError("Invalid update_info")
        assert self._engine.paused, "the model was touched during generation"
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


class StagedEnd(ReceivingEnd):
    """Does what `StagedEngine` does, with the real receivers of the transport `name`."""

    name = ""

    def __init__(self, engine: FakeEngine, workers: int = 1) -> None:
        super().__init__(engine, workers)
        # By worker, those of each rank of the learner.
        self.receivers: list[list[Any]] = []
        self.updates: list[list[dict[str, Any]]] = []
        self.stagings: list[Staging] = []
        self._wait_s = 20.0
        engine.hooks |= {
            "init_weight_transfer_engine": self._join,
            "update_weights": self._receive,
            "staged": self._look,
            "swap": self._load,
        }

    @property
    def only(self) -> list[Any]:
        """Each worker's receiver from the only rank that sends."""
        return [one for (one,) in self.receivers]

    def hang(self) -> None:
        self._engine.hooks["update_weights"] = self._never

    def close(self) -> None:
        for receiver in [one for each in self.receivers for one in each]:
            receiver.close()

    def device_of(self, rank: int) -> torch.device:
        """The device of the worker of that rank."""
        return torch.device("cpu")

    def _never(self, update_info: dict[str, Any]) -> None:
        self.stagings = []

    async def _join(self, init_info: dict[str, Any]) -> None:
        self.close()
        module, _, cls = TRANSPORTS[self.name].worker.partition(":")
        make: Callable[[dict[str, Any], Worker], Receiver] = getattr(import_module(module), cls)

        def joined(rank: int) -> list[Receiver]:
            return [make(info, Worker(rank, self.device_of(rank))) for info in init_info["shares"]]

        try:
            self.receivers = await gather(*(on_thread(joined, rank) for rank in range(1, self.workers + 1)))
        except TransferError as error:
            raise EngineError(str(error)) from error

    def _receive(self, update_info: dict[str, Any]) -> None:
        try:
            updates = of_one_version(update_info["shares"])
        except ValueError as error:
            raise EngineError(str(error)) from error
        self.updates.append(updates)

        def receiving(receiver: Receiver, update: dict[str, Any]) -> Callable[[], Share]:
            return lambda: receiver.receive(update)

        self.stagings = [
            Staging([receiving(*pair) for pair in zip(each, updates, strict=True)], _copied) for each in self.receivers
        ]
        for staging in self.stagings:
            staging.start()

    async def _look(self, body: dict[str, Any]) -> None:
        if not self.stagings:
            self._engine.staged = {"stage": "receiving", "error": None, "seconds": {}}
            await asyncio.sleep(min(body["wait_s"], 0.1))
            return
        for staging in self.stagings:
            await on_thread(staging.join, min(body["wait_s"], self._wait_s))
        reports = [staging.report() for staging in self.stagings]
        self._engine.staged = next((report for report in reports if report["stage"] != "ready"), reports[0])

    def _load(self, body: Any) -> None:
        assert self._engine.paused, "the model was touched during generation"
        self.loaded += [staging.shadow for staging in self.stagings]


def _copied(shares: Sequence[Share]) -> dict[str, torch.Tensor]:
    """As a shadow is built: the memory is received into again."""
    copies: dict[str, torch.Tensor] = {}
    for share in shares:
        copies |= dict(joined(_cloned(piece) for piece in share.pieces))
    return copies


def _cloned(piece: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor if isinstance(tensor, Part) else tensor.clone() for name, tensor in piece.items()}


class GlooEnd(StagedEnd):
    name = "gloo"

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        sent.__dict__["digest"] = bytes(16)


class HttpEnd(StagedEnd):
    name = "http"
    meets = False

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        put = BlobServer.put

        def damaged(depot: BlobServer, flat: torch.Tensor) -> str:
            other = flat.clone()
            other[len(other) // 2] ^= 1
            return put(depot, other)

        monkeypatch.setattr(BlobServer, "put", damaged)


class NcclStagedEnd(StagedEnd):
    """Behind a group of stand-ins."""

    name = "nccl_staged"

    def gpu(self, device: torch.device | None = None) -> Gpu:
        return stand_in_gpu(self.world, "GPU-0" if device is None else "GPU-1")

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world.damaged = 1


class IpcEnd(StagedEnd):
    """With `SharedMemory` in the place of CUDA's handles."""

    name = "ipc"
    meets = False

    def gpu(self, device: torch.device | None = None) -> Gpu:
        return stand_in_gpu(self.world, "GPU-0")

    def damage(self, sent: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory.damage_next(monkeypatch)
