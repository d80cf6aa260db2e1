"""vLLM's end of the staged NCCL transport."""

from __future__ import annotations

from weight_sync.manifest import Manifest
from weight_sync.transports.gpu.nccl_receiver import NcclInitInfo, NcclReceiver
from weight_sync.transports.nccl import streams
from weight_sync.vllm.engine.device_engines import DeviceEngine
from weight_sync.vllm.staging import Weights


class NcclStagedEngine(DeviceEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = NcclInitInfo
    update_info_cls = Manifest

    def join(self, init_info: NcclInitInfo) -> NcclReceiver:
        return NcclReceiver(streams.own_gpu(self.device), init_info, self.group_rank)

    def received(self, reception: NcclReceiver, update_info: Manifest) -> Weights:
        return reception.receive(update_info, self.buffer(update_info.total_bytes()))
