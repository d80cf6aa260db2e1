"""vLLM's end of the gloo transport."""

from __future__ import annotations

from typing import Any

from weight_sync.transports.gloo.group import GlooGroup, InitInfo
from weight_sync.transports.gloo.reception import Reception, UpdateInfo
from weight_sync.vllm.staged_engine import StagedEngine
from weight_sync.vllm.staging import Weights


class GlooEngine(StagedEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reception: Reception | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._reception = Reception(GlooGroup.join(init_info, rank))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._reception is None:
            raise RuntimeError("not connected to a learner: call /init_weight_transfer_engine first")
        super().receive_weights(update_info)

    def receive(self, update_info: UpdateInfo) -> Weights:
        reception = self._reception
        if reception is None:
            raise RuntimeError("the learner was let go")
        return reception.receive(update_info)

    def disconnect(self) -> None:
        self._reception = None
