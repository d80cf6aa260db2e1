"""Loads the network of a policy from its folder or hub name, and sets how it runs.

The network is a causal language model, or the text tower of a larger one. Its rotary embeddings are made to compute
what the servers compute. Layers may be compiled, or computed again in the backward pass; neither changes their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from slipstream.learner.attention import packed
from slipstream.learner.feed import packing
from slipstream.learner.model import precision
from slipstream.protocol.config import ConfigError, ModelSection

# Types of layers that differ from full attention only above a length, with the config's name for that length.
LIMITS = {
    "chunked_attention": "attention_chunk_size",
    "indexed_attention": "index_topk",
}


def load_network(
    path: str,
    model: ModelSection,
    dtype: torch.dtype,
    device: torch.device,
    longest: int | None = None,
    others: Sequence[str] = (),
    images: bool = False,
) -> Any:
    """Load the network, ready to score rows.

    In a model with vision, the text tower and the output layer train. The rest is frozen unless `model.train_vision`.

    Args:
        path: Folder or hub name of the weights.
        dtype: Type of the weights.
        longest: Tokens of the longest sequence, the servers' `max_model_len`.
        others: Attention to load it with, the first that it takes, if it does not take `model.attention`.
        images: Whether it must see, where transformers has a class for the text alone as well.

    Raises:
        ConfigError: It cannot be loaded.
    """
    precision.check_quantisation(model)
    revision = model.revision if path == model.path else None
    hub = {"revision": revision or "main", "trust_remote_code": model.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **hub)
        packed = precision.quantisation_arguments(model, dtype)
        load = partial(kind_of(config, images).from_pretrained, path, dtype=dtype, **hub, **packed)
        network = _with_attention(load, [model.attention, *others])
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ConfigError(refusal(path, model, error)) from error
    if longest is not None:
        fix_rope_frequencies(network, longest)
    freeze_all_but_text(network, model.train_vision)
    return network if packed else network.to(device)


def _with_attention(load: Callable[..., Any], names: Sequence[str]) -> Any:
    """Load with the first attention that the network takes. Raises the error of the first one if it takes none."""
    first: ValueError | ImportError | KeyError | None = None
    for name in names:
        try:
            return load(attn_implementation=name)
        except (ValueError, ImportError, KeyError) as error:
            first = first or error
    assert first is not None
    raise first


def refusal(path: str, model: ModelSection, error: Exception) -> str:
    """Say that the model cannot be loaded, and with which settings."""
    revision = model.revision if path == model.path else None
    return (
        f"model.path = {path}, model.attention = {model.attention}, model.revision = {revision}, "
        f"model.trust_remote_code = {model.trust_remote_code}: the model cannot be loaded: {error}"
    )


def kind_of(config: Any, images: bool = False) -> Any:
    """Return transformers' class that makes a network of this config: of its text part alone where there is one, and no
    images are seen."""
    needed = images or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return (
        AutoModelForImageTextToText
        if needed and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        else AutoModelForCausalLM
    )


def text_tower(network: Any) -> Any:
    """Return the part that turns tokens into hidden states; in a model with vision, the part that knows only text."""
    tower = network.get_decoder()
    if tower is network or tower is network.get_output_embeddings():
        return getattr(network, "model", network.base_model)
    return tower


def text_parameters(network: Any) -> set[int]:
    """Return the ids of the parameters that rows pass through: they train, or an adapter does in their place."""
    only_text = network.config.get_text_config() is network.config or getattr(network, "trains_vision", False)
    parts = (network,) if only_text else (text_tower(network), network.get_output_embeddings())
    return {id(parameter) for part in parts if part is not None for parameter in part.parameters()}


def check_lengths(config: Any, path: str, longest: int, padded: bool) -> None:
    """Raise `ConfigError` if a sequence can be longer than the learner computes correctly.

    Args:
        padded: Whether the network's own attention computes whole sequences.
    """
    kinds = set(getattr(config, "layer_types", None) or [])
    for kind, name in LIMITS.items():
        limit = getattr(config, name, None)
        if not padded and kind in kinds and limit is not None and longest > limit:
            raise ConfigError(
                f"model.path = {path}: its layers of type {kind} are computed as full attention, which is right for "
                f"sequences of up to {name} = {limit} tokens, and vllm.max_model_len = {longest}: lower it to {limit}"
            )
    kept = getattr(config, "keep_window_size", None)
    if kept is not None and longest > kept:
        raise ConfigError(
            f"model.path = {path}: its attention picks tokens of longer sequences by scores that look ahead: it is "
            f"right up to keep_window_size = {kept} tokens, and vllm.max_model_len = {longest}: lower it to {kept}"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    every = [parameters] if "rope_type" in parameters else list(parameters.values())
    bound = getattr(config, "max_position_embeddings", None)
    if bound and longest > bound and any("dynamic" in str(each.get("rope_type")) for each in every if each):
        raise ConfigError(
            f"model.path = {path}: its rotary embeddings (dynamic) scale with the length of each sequence above "
            f"{bound} tokens, which a packed row cannot hold apart, and vllm.max_model_len = {longest}: lower it to "
            f"{bound}"
        )


def freeze_all_but_text(network: Any, train_vision: bool = False) -> None:
    """Freeze the weights that no row passes through; with `train_vision`, none."""
    network.trains_vision = train_vision
    trained = text_parameters(network)
    for parameter in network.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


LONGROPE = "longrope"


def fix_rope_frequencies(network: torch.nn.Module, longest: int) -> None:
    """Fix the frequencies of LongRoPE (arXiv:2402.13753), once and for all rows.

    transformers uses the long factors for a whole row if its longest sequence is longer than the model's
    `original_max_position_embeddings`: a short sequence would be scored according to what it is packed with. Servers
    use them for all sequences if `max_model_len` is above that bound, and for none otherwise; so does the network after
    this.

    Args:
        longest: The servers' `max_model_len`.
    """
    modules: Iterable[Any] = network.modules()
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        if kinds == LONGROPE:
            if longest > module.config.rope_parameters["original_max_position_embeddings"]:
                _take_long(module, None)
                module.rope_type = "default"  # or transformers would update the frequencies for each row
        elif isinstance(kinds, dict):
            parameters = module.config.rope_parameters
            for layer_type in [name for name, kind in kinds.items() if kind == LONGROPE]:
                if longest > parameters[layer_type]["original_max_position_embeddings"]:
                    _take_long(module, layer_type)
                    module.rope_type = {**module.rope_type, layer_type: "default"}


def _take_long(module: Any, layer_type: str | None) -> None:
    """Put the long factors into a module. `layer_type` is given for a module with frequencies for each type of
    layers."""
    parameters = module.config.rope_parameters[layer_type] if layer_type else module.config.rope_parameters
    above = parameters["original_max_position_embeddings"] + 1
    prefix = f"{layer_type}_" if layer_type else ""
    device = getattr(module, f"{prefix}inv_freq").device
    # Computed on the host, as transformers computes the others: a GPU may round otherwise.
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](
        module.config, torch.device("cpu"), seq_len=above, layer_type=layer_type
    )
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(device), persistent=False)


def compile_layers(model: torch.nn.Module) -> None:
    """Run each layer as compiled code, except attention, for rows of any length.

    The code is compiled when a layer first runs. Raises `ConfigError` if the model has no layers of transformers' kind.
    """
    # The layout of a row is computed in Python, and differs for each row.
    AttentionInterface.register(packing.PACKED_ATTENTION, torch.compiler.disable(packed.varlen_sdpa))  # type: ignore[no-untyped-call]
    for layer in _layers(model, "compile"):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def checkpoint_layers(model: torch.nn.Module, again: Callable[[], Any] | None = None) -> None:
    """Keep only the input of each layer for the backward pass, which computes the layer again (arXiv:1604.06174).

    Not by transformers' own switch, which requires `training` and would bring dropout with it. Raises `ConfigError` if
    the model has no layers of transformers' kind.

    Args:
        again: Called in the forward pass of each layer: makes what wraps it, and what wraps its recomputation.
    """
    contexts: dict[str, Any] = {} if again is None else {"context_fn": again}
    for layer in _layers(model, "gradient_checkpointing"):
        # Without dropout there is no random state to keep.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **contexts)


def _layers(model: torch.nn.Module, setting: str) -> Iterator[torch.nn.Module]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"learner.{setting} = true: {type(model).__name__} has no layers that are built on transformers' "
            f"GradientCheckpointingLayer; set learner.{setting} = false, or choose another model"
        )
    yield from layers
