"""Makes tiny models with random weights, the same at each call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.kit.messages import VOCABULARY

# The weights are large enough (initializer_range) that log-probs differ from token to token.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def tiny_model(**config: Any) -> Qwen3ForCausalLM:
    """Make a random Qwen3 of two layers over the kit's vocabulary, the same at each call.

    Args:
        **config: Fields of `Qwen3Config` that replace the defaults.
    """
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 8, "tie_word_embeddings": False, **config}))


def save_tiny_model(path: Path) -> Path:
    """Write a tiny model to the folder `path`, with an empty tokenizer configuration, and return the folder."""
    tiny_model().save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path
