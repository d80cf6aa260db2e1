"""The workers' ends of the transports, real but for vLLM: they stand behind a fake vLLM's routes."""

from __future__ import annotations

from typing import Any

import torch

from tests.kit.fake_vllm.engine import EngineError, FakeEngine
from weight_sync.cancellation import on_thread, together
from weight_sync.manifest import Manifest
from weight_sync.transports.gloo.group import GlooGroup, InitInfo
from weight_sync.transports.gloo.reception import Reception


class Receiver:
    """Becomes the hooks of `engine`. This one receives nothing: it stands for an end that runs only on a GPU.

    `loaded`: what reached the model of each worker at each publication, by name.
    """

    runs_here = False

    def __init__(self, engine: FakeEngine) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = []
        self._engine = engine

    def hang(self) -> None:
        """Receive nothing from now on, while the server answers as far as it can without."""


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
