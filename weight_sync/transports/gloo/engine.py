"""vLLM's end of the gloo transport: an engine that stages, verifies, and only then touches the model.

A call to an engine blocks vLLM's engine loop, so `update_weights` hands the receiving to a thread and returns:
generation goes on until the publisher pauses it for `finish_weight_update`, the only call that changes the
model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from weight_sync.manifest import Manifest
from weight_sync.snapshot import digest_of
from weight_sync.transports.gloo.group import BAD_DIGEST, OK, GlooGroup, dist, local_host_towards

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InitInfo:
    """Body of `/init_weight_transfer_engine`: where the learner listens, and how it sends."""

    master_address: str
    master_port: int
    world_size: int
    bucket_bytes: int
    timeout_s: float


class Reception(threading.Thread):
    """One snapshot on its way into staging. `views` is set once the digest agreed, `error` when it failed."""

    def __init__(self, group: GlooGroup, manifest: Manifest, bucket_bytes: int) -> None:
        super().__init__(name="weight-reception", daemon=True)
        self.views: dict[str, torch.Tensor] | None = None
        self.error: str | None = None
        self._group = group
        self._manifest = manifest
        self._bucket_bytes = bucket_bytes

    def run(self) -> None:
        try:
            flat = torch.empty(self._manifest.total_bytes(), dtype=torch.uint8)
            self._group.broadcast_in_buckets(flat, self._bucket_bytes)
            digest = torch.empty(32, dtype=torch.uint8)
            self._group.broadcast(digest)
            if digest_of(flat) == digest.numpy().tobytes():
                self.views = self._manifest.views(flat)
                self._group.send_status(OK)
            else:
                self.error = "the digest of what arrived is not the learner's"
                self._group.send_status(BAD_DIGEST)
        except Exception as error:
            # The learner may be gone; whoever calls finish_weight_update is told.
            self.views = None
            self.error = f"{type(error).__name__}: {error}"
            logger.warning("weights did not arrive: %s", self.error)


class GlooEngine(WeightTransferEngine):
    """Engine of one vLLM worker. See vLLM's `WeightTransferEngine` for when each method is called."""

    init_info_cls = InitInfo
    update_info_cls = Manifest

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | None = None
        self._bucket_bytes = 0
        self._timeout_s = 0.0
        self._reception: Reception | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(
            init_info.master_address,
            init_info.master_port,
            init_info.world_size,
            is_master=False,
            timeout=timedelta(seconds=init_info.timeout_s),
        )
        self._bucket_bytes = init_info.bucket_bytes
        self._timeout_s = init_info.timeout_s
        self._group = GlooGroup(
            store, rank, init_info.world_size, local_host_towards(init_info.master_address), init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        if self._reception is not None and self._reception.is_alive():
            raise RuntimeError("the reception of the last update has not ended")
        self._reception = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Manifest) -> None:
        """Begin to receive on a thread; the learner learns of its end by the workers' statuses."""
        if self._group is None:
            raise RuntimeError("not connected to a learner: call /init_weight_transfer_engine first")
        self._reception = Reception(self._group, update_info, self._bucket_bytes)
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

    On a CPU, vLLM packs linear weights when it loads them. A tied output head is a module of its own that no
    tensor of the checkpoint reaches, so its packed copy is made anew here.
    """
    with _without_false_alarms(model):
        initialize_layerwise_reload(model)
        model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


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
