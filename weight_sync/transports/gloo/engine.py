"""vLLM's end of the gloo transport."""

from __future__ import annotations

from weight_sync.transports.gloo.group import GlooGroup, InitInfo
from weight_sync.transports.gloo.reception import Reception, UpdateInfo
from weight_sync.vllm.staged_engine import StagedEngine


class GlooEngine(StagedEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def join(self, init_info: InitInfo) -> Reception:
        return Reception(GlooGroup.join(init_info, self.group_rank))
