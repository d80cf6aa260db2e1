"""Loads new weights into the live model under the pause, for models that no shadow can be built of.

`UpdateCheck` checks any load in place: that all arrived once, and what the layers must hold afterwards.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, CopyCounter
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from slipstream.weight_sync.transports.receiver import Weights
from slipstream.weight_sync.vllm.engine.contract import ModelConfig, VllmConfig
from slipstream.weight_sync.vllm.engine.fingerprints import ModelFingerprints, Products, fingerprint
from slipstream.weight_sync.vllm.engine.layer_proof import Watched, watching
from slipstream.weight_sync.vllm.engine.shadow_checks import is_of_tower

# For each live model, the tensors that were once found as they arrived (`ModelFingerprints.known`).
_known: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class UpdateCheck:
    """Checks one update of `model`, which vLLM has made ready to load.

    Attributes:
        prints: Fingerprints that the live tensors must have after the load, by name.
        products: Expected products of layers that cannot be read, by the layer's name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.prints: dict[str, str] = {}
        self.products: dict[str, Products] = {}
        self._model = model
        self._as_they_stand = {
            name: (parameter.shape, parameter.dtype)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self._seen: set[str] = set()

    def check_announced(self, names: Sequence[str], dtypes: Sequence[str], vllm_config: VllmConfig) -> None:
        """Check names and types before anything is received.

        Raises:
            ValueError: A tensor comes twice, or in another type than the model's.
        """
        twice = [name for name, times in Counter([*names, *self._seen]).items() if times > 1]
        if twice:
            raise ValueError(f"{len(twice)} tensors were sent twice, among them {twice[0]}")
        known = {str(dtype) for _, dtype in self._as_they_stand.values()} | {str(vllm_config.model_config.dtype)}
        known |= {str(buffer.dtype) for buffer in self._model.buffers()}
        for name, dtype in zip(names, dtypes, strict=True):
            if f"torch.{dtype}" not in known:
                raise ValueError(
                    f"{name} came as {dtype}, and this server's model is {sorted(known)}: "
                    f"set model.dtype to one type for both"
                )

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor that is about to be loaded."""
        self._seen.add(name)
        if self._as_they_stand.get(name) == (tensor.shape, tensor.dtype):
            self.prints[name] = fingerprint(tensor)

    def take(self, watched: Watched) -> None:
        """Add the values that layers had when they were loaded. Fingerprints of tensors that arrived under a
        parameter's name take precedence."""
        self.prints = watched.prints | self.prints
        self.products |= watched.products

    def check_whole(self) -> None:
        """Check that every parameter was sent whole.

        To be called before vLLM ends the load: vLLM only warns, and keeps the old weights of a layer that got nothing.

        Raises:
            ValueError: Some were not.
        """
        short = [
            name
            for of, module in self._model.named_modules()
            for name in self._short(of, module)
            # A tower that does not train is not sent.
            if not (is_of_tower(self._model, of) and not get_layerwise_info(module).load_numel)
        ]
        if short:
            raise ValueError(
                f"{len(short)} parameters of this server's model were not sent whole, among them {short[0]}: it holds "
                f"older weights there"
            )

    def _short(self, name: str, module: Any) -> Iterator[str]:
        info = get_layerwise_info(module)
        parameters = {of: tensor for of, tensor in info.restore_metadata[0].items() if of not in SKIP_TENSORS}
        if not info.can_load() or not parameters or is_deferred_attention_layer(module):
            return
        # A tied head has the embedding's weight, and a padded vocabulary is more than was sent.
        if isinstance(module, ParallelLMHead) and info.load_numel == 0:
            return
        if isinstance(module, VocabParallelEmbedding) and info.load_numel > 0:
            return
        # Some quantised layers have more than a checkpoint holds, and experts may be another worker's.
        plain = type(getattr(module, "quant_method", None)).__name__.startswith(("Unquantized", "NoneType"))
        got = {of for of, _ in info.loaded_weights}
        # vLLM keeps biases where they are, so they are not in its record.
        biased = {"bias"} if plain and module._parameters.get("bias") is not None else set()
        if info.load_numel == 0 or not plain:
            missing = parameters.keys() if info.load_numel == 0 else set()
        else:
            missing = (parameters.keys() | biased) - got
            whole = all(tensor.ndim < 3 for tensor in parameters.values())
            if whole and not missing and info.load_numel < sum(tensor.numel() for tensor in parameters.values()):
                missing = parameters.keys()
        yield from (f"{name}.{of}" for of in sorted(missing))


class DirectWrites(TorchFunctionMode):
    """Hands what a model's own loader copies straight into a parameter to the parameter's loader, while inside.

    vLLM's layerwise reload gives parameters without memory to the loaders of a model, and waits for calls of each
    parameter's `weight_loader`. Some models (GPT-OSS's experts and attention sinks, in vllm 0.32) do without: they copy
    into the parameter, and what they copy would be lost.

    Args:
        model: A model that `initialize_layerwise_reload` has made ready.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._places = {
            id(parameter): (layer, name)
            for layer in model.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and parameter.is_meta
        }

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = self._places.get(id(args[0])) if args and func in (_DATA, torch.Tensor.copy_) else None
        # Loaders copy into the same parameters while vLLM counts what they load.
        if place is None or isinstance(_get_current_dispatch_mode(), CopyCounter):
            return func(*args, **(kwargs or {}))
        if func == torch.Tensor.copy_:
            _load(*place, args[0], args[1])
        return args[0]


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def _load(layer: torch.nn.Module, name: str, parameter: Any, value: torch.Tensor) -> None:
    """Load a parameter as if it had no loader of its own. `parameter`: without memory; the layer may have another by
    now."""
    held: Any = getattr(layer, name)
    held.weight_loader = default_weight_loader
    held.weight_loader = parameter.weight_loader = make_online_process_loader(layer, name)
    parameter.weight_loader(parameter, value)


class Reload:
    """Weights (tensors by name, as in a checkpoint) to be loaded into the live model under the pause.

    Attributes:
        proven: Fingerprints that the live model must have after `exchange`, None before.
    """

    def __init__(self, model: Any, model_config: ModelConfig, weights: Weights) -> None:
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
            load_staged(self._model, self._model_config, self._weights, self._check)
        self._check.take(watched)
        known = _known.setdefault(self._model, set())
        self.proven = ModelFingerprints(self._check.prints, products=self._check.products, known=known)


def load_staged(model: Any, model_config: ModelConfig, weights: Weights, check: UpdateCheck | None = None) -> None:
    """Reload `model` from `weights`, names and tensors as in a checkpoint. Generation must be paused.

    Raises:
        ValueError: Some parameters got nothing. The model is half new then.

    On a CPU vLLM packs weights when it loads them, but not all of them again when it reloads. No tensor of the
    checkpoint reaches a tied output head, which is its own module; experts are packed at their first load only,
    and would be read as packed although they are not. Both are packed here.
    """
    with _without_false_alarms(model):
        initialize_layerwise_reload(model)
        with DirectWrites(model):
            model.load_weights(iter(weights.items()))
        try:
            if check is not None:
                check.check_whole()
        finally:
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
