"""A vLLM worker for tests: `--worker-extension-cls tests.kit.vllm_worker.KitWorker`.

`tests.kit.collective_rpc` calls what it adds: damage to the model, and counts of bytes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from slipstream.weight_sync.vllm.worker import SlipstreamWorker
from tests.kit import cpu_experts
from tests.kit.counted_bytes import ByteCounter, counting_bytes

cpu_experts.install()


class KitWorker(SlipstreamWorker):
    """Names its place in each answer: `engine`, `rank` and the module of its model `runner`."""

    rank: int
    parallel_config: Any
    _slipstream_counting: AbstractContextManager[ByteCounter]
    _slipstream_counter: ByteCounter

    def slipstream_damage(self, engine: int, rank: int, by: float) -> dict[str, Any]:
        """Add `by` to one element of the last norm that worker `rank` of `engine` holds. Others do nothing."""
        place = self._slipstream_place()
        if (place["engine"], place["rank"]) == (engine, rank):
            parameters = self.model_runner.model.named_parameters()
            last = [tensor for name, tensor in parameters if name.endswith("norm.weight")][-1]
            with torch.no_grad():
                last[0] += by
        return place

    def slipstream_count(self) -> dict[str, Any]:
        """Begin to count the bytes of the engine's thread, and of those that begin from now on."""
        self._slipstream_counting = counting_bytes()
        self._slipstream_counter = self._slipstream_counting.__enter__()
        return self._slipstream_place()

    def slipstream_counted(self) -> dict[str, Any]:
        """Stop, and return `ByteCounter.counts` and the `weights`: bytes of the model's own tensors."""
        self._slipstream_counting.__exit__(None, None, None)
        tensors = self.model_runner.model.state_dict().values()
        weights = sum(tensor.nbytes for tensor in tensors if not tensor.is_mkldnn)
        return {**self._slipstream_place(), **self._slipstream_counter.counts(), "weights": weights}

    def _slipstream_place(self) -> dict[str, Any]:
        engine = self.parallel_config.data_parallel_index
        return {"engine": engine, "rank": self.rank, "runner": type(self.model_runner).__module__}
