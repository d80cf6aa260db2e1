"""vLLM's end of the gloo transport: an engine that stages, verifies, and only then touches the model.

A call to an engine blocks vLLM's engine loop, so `update_weights` leaves the receiving to a thread and returns:
generation goes on until the learner pauses it for `finish_weight_update`, the only call that changes the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from weight_sync.manifest import Manifest
from weight_sync.transports.gloo.group import GlooGroup, InitInfo
from weight_sync.transports.gloo.reception import Reception


class GlooEngine(WeightTransferEngine):
    """Engine of one vLLM worker. See vLLM's `WeightTransferEngine` for when each method is called."""

    init_info_cls = InitInfo
    update_info_cls = Manifest

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | None = None
        self._timeout_s = 0.0
        self._reception: Reception | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._timeout_s = init_info.timeout_s
        self._group = GlooGroup.join(init_info, rank)

    def start_weight_update(self) -> None:
        if self._reception is not None and self._reception.is_alive():
            raise RuntimeError("the reception of the last update has not ended")
        self._reception = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Manifest) -> None:
        """Begin to receive, on a thread; the statuses that workers send tell the learner when it has ended."""
        if self._group is None:
            raise RuntimeError("not connected to a learner: call /init_weight_transfer_engine first")
        self._reception = Reception(self._group, update_info)
        self._reception.start()

    def finish_weight_update(self) -> None:
        """Swap the staged weights in. Raises, and leaves the model as it is, if they did not arrive whole."""
        reception, self._reception = self._reception, None
        if reception is None:
            raise RuntimeError("no weights were sent since start_weight_update")
        reception.join(self._timeout_s)
        if reception.views is None:
            raise RuntimeError(f"weights not swapped: {reception.error or 'they have not all arrived'}")
        load_staged(self.model, self.model_config, reception.views)

    def shutdown(self) -> None:
        self._group = None
        self._reception = None


def load_staged(model: Any, model_config: Any, weights: dict[str, torch.Tensor]) -> None:
    """Reload `model` from `weights`, names and tensors as in a checkpoint; generation must be paused.

    On a CPU, vLLM packs weights when it loads them, and not all of them again when it reloads. No tensor of the
    checkpoint reaches a tied output head, which is a module of its own; experts are packed at their first load only,
    and would be read as packed when they are not. Both are packed here.
    """
    with _without_false_alarms(model):
        initialize_layerwise_reload(model)
        model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


@contextmanager
def _without_false_alarms(model: Any) -> Iterator[None]:
    """Keeps vLLM from warning at each reload of modules that no checkpoint holds, such as rotary embeddings."""
    with_parameters = {type(module).__name__ for module in model.modules() if list(module.parameters(recurse=False))}

    def concerns_parameters(record: logging.LogRecord) -> bool:
        return not record.msg.endswith("Failed to load weights") or not with_parameters.isdisjoint(record.args or ())

    reload_logger = logging.getLogger(initialize_layerwise_reload.__module__)
    reload_logger.addFilter(concerns_parameters)
    try:
        yield
    finally:
        reload_logger.removeFilter(concerns_parameters)
