"""Attention of a packed row on any device, `attention = "varlen_sdpa"`: every sequence sees its own path only.

It takes the best exact way that there is: on a CPU the row's trie as it stands (`cpu`); on a GPU the same with torch's
FlashAttention (`flash`), which needs 16 bits; otherwise keys gathered along every path (`paths`). A layer with a
sliding window uses the paths too, where one of them is longer than the window.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from slipstream.learner.attention import cpu, cpu_layout, flash, paths
from slipstream.learner.attention.paths import sent
from slipstream.learner.feed.packing import PACKED_ATTENTION, PackedRow
from slipstream.protocol.config import ConfigError

# Arguments by which models change the computation of attention; ignoring one would train on wrong log-probs.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "attn_logit_softcapping")


class RowLayout:
    """Plans how a row's attention is computed: made once a row, by the first layer that asks, and used by all.

    Attributes:
        longest: Tokens of the longest sequence.
    """

    def __init__(self, row: PackedRow) -> None:
        self.longest = row.longest
        self._nodes = row.starts, row.reach
        self._device = row.input_ids.device

    @cached_property
    def trie(self) -> cpu_layout.TrieLayout:
        return cpu_layout.trie_layout(*self._nodes)

    @cached_property
    def flash_row(self) -> flash.FlashLayout:
        return flash.flash_layout(*self._nodes, self._device)

    @cached_property
    def paths(self) -> paths.Paths:
        return paths.layout(*self._nodes, self._device)


def model_arguments(implementation: str, row: PackedRow) -> dict[str, Any]:
    """Return the arguments that a transformers model needs, next to ids and positions, to keep the sequences of `row`
    apart."""
    return {"row_layout": RowLayout(row)} if implementation == PACKED_ATTENTION else sequence_bounds(row)


def sequence_bounds(row: PackedRow) -> dict[str, Any]:
    """Return where the sequences of a row that shares no tokens begin and end, as transformers' layers take it."""
    bounds = sent(torch.tensor(row.starts, dtype=torch.int32), row.input_ids.device)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": row.longest,
        "max_length_k": row.longest,
    }


def varlen_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    row_layout: RowLayout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' `AttentionInterface`.

    There is no dropout, on purpose: log-probs must be those of the policy that sampled.

    Args:
        query: [1, H, T, D].
        key: [1, H_kv, T, D], H a multiple of H_kv.
        value: [1, H_kv, T, D_v], D_v <= D.

    Returns:
        [1, T, H, D_v].

    Raises:
        ConfigError: The model's attention is of another kind.
    """
    if attention_mask is not None:
        raise ConfigError(
            f"model.attention = {PACKED_ATTENTION} knows no mask, and this model makes one of its own: choose another"
        )
    _refuse_others(kwargs)
    window = _window(module, sliding_window)
    width, value_width = query.shape[-1], value.shape[-1]
    q, k, v = (_cast(tensor)[0].transpose(0, 1) for tensor in (query, key, value))
    if value_width < width:
        v = pad(v, (0, width - value_width))
    if window is not None and row_layout.longest > window:
        out = paths.along_paths(q, k, v, row_layout.paths, scaling, window)
    elif q.device.type == "cpu":
        fast = cpu.fastest_type(q.dtype, row_layout.longest)
        out = cpu.trie_attention(q.to(fast), k.to(fast), v.to(fast), row_layout.trie, scaling).to(q.dtype)
    elif flash.flash_supports(q):
        out = flash.flash_trie(q, k, v, row_layout.flash_row, scaling)
    else:
        out = paths.along_paths(q, k, v, row_layout.paths, scaling)
    return out[None, ..., :value_width], None


def _refuse_others(arguments: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"model.attention = {PACKED_ATTENTION} does not support {name}, which this model uses: choose another"
            )
    if arguments.get("is_causal") is False:
        raise ConfigError(
            f"model.attention = {PACKED_ATTENTION} is causal, and a layer of this model is not: "
            f"choose a decoder-only model"
        )


def _window(module: torch.nn.Module, named: int | None) -> int | None:
    """Return the layer's sliding window, None where every token is within it. The model names it to its attention, or,
    if it masks outside of it, its config does."""
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None) if named is None else named
    if not window or window >= getattr(config, "max_position_embeddings", window + 1):
        return None
    types = getattr(config, "layer_types", None)
    if named is None and types and types[getattr(module, "layer_idx", 0)] != "sliding_attention":
        return None
    if named is None and not types:
        raise ConfigError(
            f"model.attention = {PACKED_ATTENTION}: this model has a sliding window of {window} tokens, but does not "
            f"name the layers that it holds for: choose another model, or set sliding_window to null in its "
            f"config.json if no sequence is longer than {window} tokens"
        )
    return window


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast as torch's own attention does under autocast: norms and rotary embeddings leave float32 next to 16 bits."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


# transformers builds a 4-D mask only for implementations in its mask interface, where this one has no entry.
AttentionInterface.register(PACKED_ATTENTION, varlen_sdpa)
