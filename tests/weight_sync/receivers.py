"""The workers' ends of the transports, real but for vLLM: they stand behind a fake vLLM's routes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.kit.fake_vllm.engine import FakeEngine
from weight_sync.cancellation import on_thread, together
from weight_sync.manifest import Manifest
from weight_sync.transports.gloo.group import GlooGroup, InitInfo
from weight_sync.transports.gloo.reception import Reception
from weight_sync.vllm.staging import Staging


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
        info = InitInfo(**init_info)
        self._timeout_s = info.timeout_s
        ranks = range(1, self._workers + 1)
        self.groups = await together(*(on_thread(GlooGroup.join, info, rank) for rank in ranks))
        self.receptions = [Reception(group) for group in self.groups]

    def _receive(self, update_info: dict[str, Any]) -> None:
        manifest = Manifest(**update_info)
        self.stagings = [Staging(partial(reception.receive, manifest), _copied) for reception in self.receptions]
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


def _copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}
