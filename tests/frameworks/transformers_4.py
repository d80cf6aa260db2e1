"""Runs in an environment with transformers 4: makes tiny models of many families, and reads model folders.

    python transformers_4.py make FOLDER          # FOLDER/NAME for each family, as transformers 4 writes it
    python transformers_4.py read FOLDER ...      # writes FOLDER/logits.pt

Nothing in it may need transformers 5.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

TOKENS = [[5, 9, 2, 17, 33, 4, 60, 71, 8, 12, 40, 3]]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 1234.0,
    "initializer_range": 0.3,
}
HEADS = {**SIZES, "head_dim": 8}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, rope_scaling=LLAMA3)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=4)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**HEADS)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**HEADS, sliding_window=4)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SIZES)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**SIZES)),
    "smollm3": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**SIZES)),
    "glm4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**HEADS)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**SIZES, logits_scaling=3.0)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**HEADS, **EXPERTS)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, **LOCAL)),
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(
            **{**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
            vision_config={**VISION, "fullatt_block_indexes": [0]},
        )
    ),
}


def read(folder: Path) -> None:
    """Write the logits of `TOKENS` under the model of a folder."""
    sees = "vision_config" in (folder / "config.json").read_text(encoding="utf-8")
    kind = tf.AutoModelForImageTextToText if sees else tf.AutoModelForCausalLM
    with torch.no_grad():
        logits = kind.from_pretrained(folder, dtype=torch.float32).eval()(torch.tensor(TOKENS)).logits
    torch.save(logits, folder / "logits.pt")


def main(what: str, *folders: str) -> None:
    if what == "make":
        for name, make in FAMILIES.items():
            torch.manual_seed(3)
            make().to(torch.float32).save_pretrained(Path(folders[0]) / name)
    else:
        for folder in folders:
            read(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
