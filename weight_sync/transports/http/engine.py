"""vLLM's end of the http transport."""

from __future__ import annotations

from weight_sync.transports.http.reception import InitInfo, Reception, UpdateInfo
from weight_sync.vllm.engine.staged_engine import StagedEngine


class HttpEngine(StagedEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def join(self, init_info: InitInfo) -> Reception:
        reception = Reception(init_info)
        reception.greet()
        return reception
