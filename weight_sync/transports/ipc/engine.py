"""vLLM's end of the IPC transport."""

from __future__ import annotations

from weight_sync.manifest import Manifest
from weight_sync.transports.ipc.reception import InitInfo, Reception, UpdateInfo
from weight_sync.transports.nccl import streams
from weight_sync.vllm.engine.device_engines import DeviceEngine
from weight_sync.vllm.staging import Weights


class IpcEngine(DeviceEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def join(self, init_info: InitInfo) -> Reception:
        return Reception(streams.own_gpu(self.device), init_info)

    def received(self, reception: Reception, update_info: UpdateInfo) -> Weights:
        return reception.receive(update_info, self.buffer(Manifest(**update_info.manifest).total_bytes()))
