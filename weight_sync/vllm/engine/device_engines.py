"""vLLM's end of the staged transports between GPUs: the pause holds nothing but copies from device to device.

Captured graphs hold pointers into the live model, so its tensors stay where they are and are written to, which the
shadow does for tensors of a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from weight_sync.transports.gpu import communicator
from weight_sync.transports.gpu.ipc import IpcInitInfo, IpcReceiver, IpcUpdateInfo
from weight_sync.transports.gpu.nccl_receiver import NcclInitInfo, NcclReceiver
from weight_sync.vllm.engine.reload import Weights
from weight_sync.vllm.engine.staged_engine import StagedEngine
from weight_sync.weights.manifest import Manifest


class DeviceEngine(StagedEngine):
    """`StagedEngine` of a worker on a GPU. A subclass gives the same as there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stream: Any = None
        self._on_device: torch.Tensor | None = None

    def buffer(self, size: int) -> torch.Tensor:
        """Return a uint8 [size] on the worker's GPU, the same memory at every update of that size."""
        if self._on_device is None or len(self._on_device) != size:
            self._on_device = None  # frees the old one first
            self._on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._on_device

    def shutdown(self) -> None:
        """As `StagedEngine.shutdown`. A thread that still receives keeps the buffer; the next one gets another."""
        if self._staging is not None and self._staging.is_alive():
            self._on_device = None
        super().shutdown()

    def build(self, weights: Weights) -> Any:
        """As `StagedEngine.build`, on a stream beside generation's, and done when it returns."""
        if self.device.type != "cuda":
            return super().build(weights)
        if self._stream is None:
            make: Any = torch.cuda.Stream
            self._stream = make(self.device)
        with torch.cuda.stream(self._stream):
            shadow = super().build(weights)
            self._stream.synchronize()  # the swap copies on another stream
        return shadow

    def finish_weight_update(self) -> None:
        """As `StagedEngine.finish_weight_update`. A copy that fails raises here, not in a later forward pass."""
        super().finish_weight_update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class IpcEngine(DeviceEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = IpcInitInfo
    update_info_cls = IpcUpdateInfo

    def join(self, init_info: IpcInitInfo) -> IpcReceiver:
        return IpcReceiver(communicator.own_gpu(self.device), init_info)

    def received(self, receiver: IpcReceiver, update_info: IpcUpdateInfo) -> Weights:
        return receiver.receive(update_info, self.buffer(Manifest(**update_info.manifest).total_bytes()))


class NcclStagedEngine(DeviceEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = NcclInitInfo
    update_info_cls = Manifest

    def join(self, init_info: NcclInitInfo) -> NcclReceiver:
        return NcclReceiver(communicator.own_gpu(self.device), init_info, self.group_rank)

    def received(self, receiver: NcclReceiver, update_info: Manifest) -> Weights:
        return receiver.receive(update_info, self.buffer(update_info.total_bytes()))
