"""vLLM's end of the gloo transport."""

from __future__ import annotations

from weight_sync.transports.gloo.group import GlooGroup, GlooInitInfo
from weight_sync.transports.gloo.receiver import GlooReceiver, GlooUpdateInfo
from weight_sync.vllm.engine.staged_engine import StagedEngine


class GlooEngine(StagedEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def join(self, init_info: GlooInitInfo) -> GlooReceiver:
        return GlooReceiver(GlooGroup.join(init_info, self.group_rank))
