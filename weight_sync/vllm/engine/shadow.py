"""Builds a worker's new weights during generation, so that the pause holds nothing but an exchange.

The shadow is a second tree of the model's modules (`shadow_modules`), into which weights are loaded and packed while
the live modules generate. In the pause the live modules take its tensors. Until then the live model is not touched.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS

from slipstream.weight_sync.transports.receiver import Weights
from slipstream.weight_sync.vllm.engine.arrivals import Arrivals, MustBeWhole, Reading
from slipstream.weight_sync.vllm.engine.contract import VllmConfig
from slipstream.weight_sync.vllm.engine.fingerprints import held
from slipstream.weight_sync.vllm.engine.layer_proof import watching
from slipstream.weight_sync.vllm.engine.reload import DirectWrites, Reload
from slipstream.weight_sync.vllm.engine.shadow_checks import (
    NoShadow,
    RowSums,
    another_model,
    check_can_be_shadowed,
    check_types,
    check_width,
    is_of_tower,
)
from slipstream.weight_sync.vllm.engine.shadow_modules import (
    CONTAINERS,
    LOOKUP_ONLY,
    PackingError,
    Pair,
    bind_to_live,
    let_go,
    pair_modules,
)
from slipstream.weight_sync.weights.parts import NotInParts

logger = logging.getLogger(__name__)

# The old weights are freed this long after the pause, as that takes longer than the exchange.
FREE_AFTER_S = 0.2
NOT_LOADED = {"_non_persistent_buffers_set", *CONTAINERS}


def build(model: Any, vllm_config: VllmConfig, arrivals: Arrivals, whole: bool = False) -> Shadow | Reload:
    """Prepare the exchange of the live weights of `model` for those that arrive.

    Args:
        whole: Whether to reload the model under the pause, as no shadow of it can be built.

    Returns:
        A shadow; a reload under the pause if no shadow can be built, which is logged.

    Raises:
        ValueError: Names, shapes or types are not the model's.
        MustBeWhole: No shadow can be built, which only showed when weights had gone.
    """
    check_types(model, vllm_config.model_config.dtype, arrivals.stand_ins)
    check_width(model, vllm_config.model_config.model, arrivals.stand_ins)
    begun = False
    try:
        check_can_be_shadowed(model)
        if not whole:
            begun = True
            return Shadow(model, vllm_config, arrivals)
    except NoShadow as why:
        if begun and not arrivals.kept:
            raise MustBeWhole(f"{why}: the next update will be loaded under the pause") from why
        logger.warning("%s: weights are loaded under the pause, which takes longer", why)
    return Reload(model, vllm_config.model_config, arrivals.whole())


class Shadow:
    """The new weights in modules of their own.

    Attributes:
        pairs: The live modules that get new weights, and their shadows.
        proven: Fingerprints of the shadows, which the live modules must have after the exchange.
        of_tower: Whether weights of a part that sees are among them.
    """

    def __init__(self, model: Any, vllm_config: VllmConfig, arrivals: Arrivals) -> None:
        all_pairs = pair_modules(model)
        try:
            with torch.no_grad(), _config_known(vllm_config):
                parallel = vllm_config.parallel_config
                shared = parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
                whole = not shared and not parallel.enable_expert_parallel
                layers = [(pair.name, pair.live, pair.shadow) for pair in all_pairs]
                rows = RowSums(all_pairs)
                with watching(layers) as watched:
                    reading = Reading(arrivals, all_pairs, rows.note if whole else None)
                    self.pairs = _load(all_pairs, reading, arrivals.stand_ins, whole, vllm_config.model_config.model)
                if whole:
                    rows.check_held()
        except BaseException:
            let_go(all_pairs)
            raise
        self.of_tower = any(is_of_tower(model, pair.name) for pair in self.pairs)
        self.proven = replace(held(all_pairs[0].shadow), products=watched.products)
        self._all = all_pairs
        referred = _referred(all_pairs)
        self._changes = [change for pair in self.pairs for change in _changes(pair, referred)]

    def exchange(self) -> None:
        """Make the live modules compute with the shadow's tensors. Generation must stand still."""
        old: list[Any] = []
        with torch.no_grad():
            for change in self._changes:
                old.append(change())
        pairs, self.pairs, self._changes = self._all, [], []
        self._all = []

        def free() -> None:
            let_go(pairs)
            pairs.clear()
            old.clear()

        timer = threading.Timer(FREE_AFTER_S, free)
        timer.daemon = True
        timer.start()


def _load(pairs: list[Pair], reading: Reading, sent_tensors: Weights, whole: bool, of: str = "its model") -> list[Pair]:
    """Load what is read into the shadows and pack them.

    Args:
        sent_tensors: Stand-ins of all that is read.
        whole: Whether no part of a tensor belongs to another worker.
        of: Name of the model that the server was started with.

    Returns:
        The pairs that were loaded.
    """
    shadow = pairs[0].shadow
    _mark_lookups(pairs)
    initialize_layerwise_reload(shadow)
    for pair in pairs:
        # Else what is processed would be copied into the live tensors.
        pair.info.kernel_tensors = None
    sizes = [pair.info.load_numel_total for pair in pairs]
    try:
        with DirectWrites(shadow):
            shadow.load_weights(reading)
    except NotInParts as error:
        raise NotInParts(error.what, reading.at) from None
    except PackingError as error:
        raise PackingError(f"{reading.place(pairs)} was loaded, but not packed: {error}") from error
    except (AssertionError, KeyError, RuntimeError) as error:
        if error is reading.broke:
            raise
        failed = f"{reading.place(pairs)} could not be loaded"
        # Loaders assert shapes and look names up. Other errors, such as too little memory, say nothing of the model.
        if isinstance(error, RuntimeError) and not _OF_SHAPES.search(str(error)):
            raise RuntimeError(f"{failed}: {_words(error)}; the server's log has the traceback") from error
        raise ValueError(f"{failed} ({_words(error)}): {another_model(of)}") from error
    placed = sum(
        size if not pair.info.can_load() else pair.info.load_numel for pair, size in zip(pairs, sizes, strict=True)
    )
    loaded = [pair for pair in pairs if _processed(pair)]
    loaded += _tie([pair for pair in pairs if pair.info.can_load()], loaded)
    left = [pair for pair in pairs if pair not in loaded]
    towers = [pair for pair, size in zip(pairs, sizes, strict=True) if size and is_of_tower(pairs[0].live, pair.name)]
    frozen = [] if any(pair in loaded for pair in towers) else towers
    _check_complete([pair for pair in left if pair not in frozen])
    # vLLM's reload leaves these alone: their loaders write them at once.
    apart = sum(
        tensor.numel()
        for pair in pairs
        for name, tensor in (*pair.shadow._parameters.items(), *pair.shadow._buffers.items())
        if name in SKIP_LOAD_TENSORS and tensor is not None
    )
    sent = sum(tensor.numel() for tensor in sent_tensors.values())
    if whole and sent > placed + apart and not _head_is_tied_and_sent(pairs, sent_tensors):
        raise ValueError(f"of {sent} elements that were sent, {sent - placed} have no place in this server's model")
    for pair in loaded:
        _pack_experts(pair.shadow)
    return loaded


# Torch's messages for tensors that do not fit each other.
_OF_SHAPES = re.compile(r"must match|size mismatch|invalid for input of size|expanded size|broadcast")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _processed(pair: Pair) -> bool:
    """Return whether the shadow was loaded. A padded vocabulary is loaded once all that was sent for it has come."""
    info = pair.info
    if not info.can_load():
        return True
    if info.load_numel == 0:
        return False
    if is_deferred_attention_layer(pair.shadow):
        raise NoShadow(f"{pair.name} ({type(pair.shadow).__name__}) was sent scales")
    own = _own_buffers(pair)
    missing = info.load_numel_total - sum(buffer.numel() for buffer in own.values()) - info.load_numel
    if not isinstance(pair.shadow, VocabParallelEmbedding) and missing > 0:
        raise ValueError(f"{pair.name}: {info.load_numel} of {info.load_numel_total} elements came")
    _layerwise_process(pair.shadow, info)
    pair.shadow._buffers.update(own)
    return True


def _own_buffers(pair: Pair) -> dict[str, Any]:
    """Return live buffers that a layer made when it was built, which no checkpoint has and no load has brought."""
    got = {name for name, _ in pair.info.loaded_weights}
    names = pair.live._non_persistent_buffers_set & pair.info.restore_metadata[1].keys() & pair.live._buffers.keys()
    return {name: pair.live._buffers[name] for name in names - got}


def _tie(left: list[Pair], loaded: list[Pair]) -> list[Pair]:
    """Tie and pack those of `left` that share live tensors with loaded modules, as an output head may."""
    owners = {id(tensor): (pair, name) for pair in loaded for name, tensor in pair.live._parameters.items()}
    tied = []
    for pair in left:
        shared = {n: owners[id(t)] for n, t in pair.live._parameters.items() if t is not None and id(t) in owners}
        for name, (owner, owners_name) in shared.items():
            pair.shadow._parameters[name] = owner.shadow._parameters[owners_name]
        if shared:
            if hasattr(pair.shadow, "cpu_linear"):
                pair.shadow.quant_method.process_weights_after_loading(pair.shadow)
            tied.append(pair)
    return tied


def _check_complete(left: list[Pair]) -> None:
    parameters = [(pair.name, pair.info.restore_metadata[0]) for pair in left]
    missing = [f"{of}.{name}" for of, tensors in parameters for name, tensor in tensors.items() if tensor.numel()]
    if missing:
        raise ValueError(f"{len(missing)} parameters of this server's model were not sent, among them {missing[0]}")


def _head_is_tied_and_sent(pairs: list[Pair], weights: Weights) -> bool:
    return "lm_head.weight" in weights and any(isinstance(pair.live, ParallelLMHead) for pair in pairs)


def _mark_lookups(pairs: list[Pair]) -> None:
    """Mark embeddings of models with a separate head: they multiply nothing, so they need no packing."""
    heads = [pair for pair in pairs if isinstance(pair.live, ParallelLMHead)]
    for pair in pairs:
        if isinstance(pair.live, VocabParallelEmbedding) and pair not in heads and heads:
            pair.shadow.__dict__[LOOKUP_ONLY] = True


def _pack_experts(shadow: Any) -> None:
    """Pack experts, which vLLM does at their first load only."""
    kernel = getattr(getattr(shadow, "quant_method", None), "moe_kernel", None)
    if kernel is not None and shadow.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(shadow)


def _referred(pairs: list[Pair]) -> set[int]:
    """Return the storages of live tensors that something besides a parameter refers to: buffers, some of which are
    views of a weight, as that of Mamba's convolution; and what attention has, as its sinks."""
    buffers = [buffer for pair in pairs for buffer in pair.live._buffers.values() if buffer is not None]
    attention = [vars(impl) for pair in pairs if (impl := getattr(pair.live, "impl", None)) is not None]
    tensors = [*buffers, *(value for of in attention for value in of.values() if isinstance(value, torch.Tensor))]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel() and not tensor.is_meta}


def _changes(pair: Pair, referred: set[int]) -> Iterator[Callable[[], Any]]:
    """Yield calls that put the shadow's tensors into the live module. Each returns the tensor that it replaced.

    Args:
        referred: Storages that something besides a parameter refers to.
    """
    for container in ("_parameters", "_buffers"):
        old = getattr(pair.live, container)
        for name, tensor in getattr(pair.shadow, container).items():
            if tensor is None or tensor is old.get(name) or tensor.is_meta:
                continue
            bind_to_live(tensor, pair)
            live = old.get(name)
            # Others hold references to these: a router's bias, and captured graphs on a GPU.
            kept = live is not None and container == "_parameters" and live.untyped_storage().data_ptr() in referred
            if live is not None and (kept or name in SKIP_TENSORS or live.device.type != "cpu"):
                yield partial(live.data.copy_, tensor.data)
            else:
                yield partial(_put, old, name, tensor)
    for name, value in pair.shadow.__dict__.items():
        live = pair.live.__dict__.get(name)
        if name in NOT_LOADED or live is value:
            continue
        if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) and live.device.type != "cpu":
            # Products of weights that are kept next to them; captured graphs hold references to these too.
            yield partial(live.copy_, value)
        else:
            yield partial(_put, pair.live.__dict__, name, value)


def _put(where: dict[str, Any], name: str, value: Any) -> Any:
    old = where.get(name)
    where[name] = value
    return old


@contextmanager
def _config_known(vllm_config: VllmConfig) -> Iterator[None]:
    """Set vLLM's current configuration, for loaders that ask. It is the process's; a worker never has another."""
    from vllm.config import vllm as module

    before = module._current_vllm_config
    module._current_vllm_config = vllm_config
    try:
        yield
    finally:
        module._current_vllm_config = before
