"""An extension of vLLM's workers for servers of TRL on a CPU. It mends two faults of vLLM 0.32's CPU build.

It multiplies with a packed copy of the output layer, which `reload_weights` does not pack again where the output layer
is the embedding: the server would continue sampling with the output layer of the start. And it ends when a request with
a seed, as each of TRL's has, is computed in several steps.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.sampling_params import SamplingParams, SamplingType

from slipstream.weight_sync.vllm.worker import SlipstreamWorker


def _without_seed(params: SamplingParams) -> SamplingType:
    """Sample from the server's own generator. TRL's seeds keep several servers apart, and here is one."""
    return SamplingType.RANDOM if params.temperature > 0 else SamplingType.GREEDY


SamplingParams.sampling_type = property(_without_seed)


class TiedHead:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def pack_head(self) -> None:
        """Pack the output layer from the weights that it has now."""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


class WithSlipstream(SlipstreamWorker):
    """Slipstream's extension of the worker, for TRL's requests."""
