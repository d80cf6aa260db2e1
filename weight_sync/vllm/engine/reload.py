"""Loads new weights into the live model under the pause, for models that no shadow can be built of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from weight_sync.vllm.engine.contract import ModelConfig
from weight_sync.vllm.engine.fingerprints import ModelFingerprints
from weight_sync.vllm.engine.layer_proof import watching
from weight_sync.vllm.engine.update import UpdateCheck

# For each live model, the tensors that were once found as they arrived (`ModelFingerprints.known`).
_known: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class Reload:
    """Weights (tensors by name, as in a checkpoint) to be loaded into the live model under the pause.

    Attributes:
        proven: Fingerprints that the live model must have after `exchange`, None before.
    """

    def __init__(self, model: Any, model_config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        self.proven: ModelFingerprints | None = None
        self._model = model
        self._model_config = model_config
        self._weights = weights
        self._check = UpdateCheck(model)
        for name, tensor in weights.items():
            self._check.note(name, tensor)

    def exchange(self) -> None:
        """Make the live model compute with the new weights. Generation must stand still. After an error the model may
        be half new."""
        layers = [(name, module, module) for name, module in self._model.named_modules()]
        with watching(layers) as watched:
            load_staged(self._model, self._model_config, self._weights)
        self._check.take(watched)
        known = _known.setdefault(self._model, set())
        self.proven = ModelFingerprints(self._check.prints, products=self._check.products, known=known)


def load_staged(model: Any, model_config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    """Reload `model` from `weights`, names and tensors as in a checkpoint. Generation must be paused.

    On a CPU vLLM packs weights when it loads them, but not all of them again when it reloads. No tensor of the
    checkpoint reaches a tied output head, which is a module of its own; experts are packed at their first load only,
    and would be read as packed although they are not. Both are packed here.
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
    """Keep vLLM from warning at each reload of modules that no checkpoint holds, such as rotary embeddings."""
    with_parameters = {type(module).__name__ for module in model.modules() if list(module.parameters(recurse=False))}

    def concerns_parameters(record: logging.LogRecord) -> bool:
        return not record.msg.endswith("Failed to load weights") or not with_parameters.isdisjoint(record.args or ())

    reload_logger = logging.getLogger(initialize_layerwise_reload.__module__)
    reload_logger.addFilter(concerns_parameters)
    try:
        yield
    finally:
        reload_logger.removeFilter(concerns_parameters)
