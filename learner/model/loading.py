"""The network of a policy from its folder or hub name: a causal language model, or the text tower of a larger one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from learner.model import quantised, rope
from protocol.config import ConfigError, ModelSection

# Layers that differ from full attention only for sequences above a length: by their type, where a config has it.
LIMITS = {
    "chunked_attention": "attention_chunk_size",
    "indexed_attention": "index_topk",
}


def load_network(
    path: str, model: ModelSection, dtype: torch.dtype, device: torch.device, longest: int | None = None
) -> Any:
    """The network with the weights at `path`, in `dtype`, on `device`, ready to score rows of sequences of up to
    `longest` tokens, the servers' `max_model_len`.

    Of a model that sees, the text tower and the output layer train; the rest is frozen, and no row passes through it.
    Raises `ConfigError` if it cannot be loaded, or if a sequence can be longer than the learner is right for.
    """
    quantised.check(model)
    revision = model.revision if path == model.path else None
    hub = {"revision": revision or "main", "trust_remote_code": model.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **hub)
        packed = quantised.arguments(model, dtype)
        network = kind_of(config).from_pretrained(
            path, dtype=dtype, attn_implementation=model.attention, **hub, **packed
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"model.path = {path}, model.attention = {model.attention}, model.revision = {revision}, "
            f"model.trust_remote_code = {model.trust_remote_code}: the model cannot be loaded: {error}"
        ) from error
    if longest is not None:
        _check_lengths(network.config.get_text_config(), path, longest)
        rope.settle(network, longest)
    _freeze_all_but_text(network)
    return network if packed else network.to(device)


def kind_of(config: Any) -> Any:
    """transformers' class that makes a network of this config."""
    sees = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def text_tower(network: Any) -> Any:
    """What turns tokens into hidden states; of a model that sees, the part that knows of text only."""
    tower = network.get_decoder()
    return network.model if tower is network and hasattr(network, "model") else tower


def _check_lengths(config: Any, path: str, longest: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or [])
    for kind, name in LIMITS.items():
        limit = getattr(config, name, None)
        if kind in kinds and limit is not None and longest > limit:
            raise ConfigError(
                f"model.path = {path}: its layers of type {kind} are computed as full attention, which is right for "
                f"sequences of up to {name} = {limit} tokens, and vllm.max_model_len = {longest}: lower it to {limit}"
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


def text_parameters(network: Any) -> set[int]:
    """The ids of the parameters that rows pass through: they train, or an adapter does in their place."""
    parts = (text_tower(network), network.get_output_embeddings())
    return {id(parameter) for part in parts if part is not None for parameter in part.parameters()}


def _freeze_all_but_text(network: Any) -> None:
    trained = text_parameters(network)
    for parameter in network.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)
