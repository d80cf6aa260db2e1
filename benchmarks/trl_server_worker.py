"""An extension of vLLM's workers for servers of TRL on a CPU.

vLLM 0.32's CPU build multiplies with a packed copy of the output layer. `reload_weights` does not pack it anew where
the output layer is the embedding, so the server would go on sampling with the output layer of the start.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class TiedHead:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def pack_head(self) -> None:
        """Pack the output layer from the weights that it has now."""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
