"""Rotary embeddings whose frequencies depend on how long sequences are, made to compute what the servers compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"


def settle(network: torch.nn.Module, longest: int) -> None:
    """Fix the frequencies of LongRoPE (arXiv:2402.13753), once and for all rows.

    longest: the servers' `max_model_len`. transformers takes the long factors for a whole row if its longest sequence
    is longer than the model's `original_max_position_embeddings`: a short sequence would be scored according to what it
    is packed with. vLLM takes them for all sequences if `longest` is above that bound, and for none otherwise; so
    does the network after this.
    """
    modules: Iterable[Any] = network.modules()
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        if kinds == LONGROPE:
            if longest > module.config.rope_parameters["original_max_position_embeddings"]:
                _take_long(module, None)
                module.rope_type = "default"  # it names the update that transformers makes for each row
        elif isinstance(kinds, dict):
            parameters = module.config.rope_parameters
            for layer_type in [name for name, kind in kinds.items() if kind == LONGROPE]:
                if longest > parameters[layer_type]["original_max_position_embeddings"]:
                    _take_long(module, layer_type)
                    module.rope_type = {**module.rope_type, layer_type: "default"}


def _take_long(module: Any, layer_type: str | None) -> None:
    """layer_type: of a module that has frequencies for each type of layers."""
    parameters = module.config.rope_parameters[layer_type] if layer_type else module.config.rope_parameters
    above = parameters["original_max_position_embeddings"] + 1
    prefix = f"{layer_type}_" if layer_type else ""
    device = getattr(module, f"{prefix}inv_freq").device
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, device, seq_len=above, layer_type=layer_type)
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
