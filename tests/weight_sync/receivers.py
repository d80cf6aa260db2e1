"""The workers' ends of the transports, real but for vLLM: they stand behind a fake vLLM's routes."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import torch

from tests.kit.fake_vllm.engine import EngineError, FakeEngine
from tests.kit.stand_in_nccl import Blocking, World, stand_in_gpu
from weight_sync.cancellation import on_thread, together
from weight_sync.manifest import Manifest
from weight_sync.transports.gloo.group import GlooGroup, InitInfo
from weight_sync.transports.gloo.reception import Reception
from weight_sync.transports.nccl.chunks import chunks
from weight_sync.transports.nccl.streams import Gpu


class Receiver:
    """Becomes the hooks of `engine`. This one receives nothing: it stands for an end that runs only on a GPU.

    `loaded`: what reached the model of each worker at each publication, by name.
    """

    runs_here = False
    # Whether what arrives damaged is refused before the model is touched; else the proof finds it.
    verifies = True

    def __init__(self, engine: FakeEngine) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = []
        self._engine = engine

    def hang(self) -> None:
        """Receive nothing from now on, while the server answers as far as it can without."""

    def gpu(self) -> Gpu:
        """The learner's end, where it needs one."""
        raise AssertionError("a transport for CPUs asked for a GPU")

    def close(self) -> None:
        """Let go of what a peer that is gone would be waited for."""


class GlooReceiver(Receiver):
    """What `GlooEngine` does, in as many `workers`."""

    runs_here = True

    def __init__(self, engine: FakeEngine, workers: int = 1) -> None:
        super().__init__(engine)
        self.groups: list[GlooGroup] = []
        self.receptions: list[Reception] = []
        self._workers = workers
        self._timeout_s = 0.0
        engine.hooks |= {
            "init_weight_transfer_engine": self._join,
            "update_weights": self._receive,
            "finish_weight_update": self._load,
        }

    def hang(self) -> None:
        self._engine.hooks["update_weights"] = lambda update_info: None

    async def _join(self, init_info: dict[str, Any]) -> None:
        info = InitInfo(**init_info)
        self._timeout_s = info.timeout_s
        ranks = range(1, self._workers + 1)
        self.groups = await together(*(on_thread(GlooGroup.join, info, rank) for rank in ranks))

    def _receive(self, update_info: dict[str, Any]) -> None:
        self.receptions = [Reception(group, Manifest(**update_info)) for group in self.groups]
        for reception in self.receptions:
            reception.start()

    async def _load(self, body: Any) -> None:
        assert self._engine.paused, "the model was touched beside generation"
        for reception in self.receptions:
            await on_thread(reception.join, self._timeout_s)
            if reception.views is None:
                raise EngineError(f"weights not swapped: {reception.error}")
            self.loaded.append(reception.views)


class NcclReceiver(Receiver):
    """What vLLM's NCCL engine does, in as many `workers`: packed, with calls that block as NCCL's do.

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
        self.groups = await together(*(on_thread(Blocking, self.world, unique_id, rank, size) for rank in ranks))

    async def _receive(self, update_info: dict[str, Any]) -> None:
        if not update_info:
            raise EngineError("Invalid update_info")
        assert self._engine.paused, "the model was touched beside generation"
        manifest = Manifest(update_info["names"], update_info["dtype_names"], update_info["shapes"])
        self.loaded += await together(*(on_thread(self._unpack, group, manifest) for group in self.groups))

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
