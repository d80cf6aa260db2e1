"""Tiny random models of many families, by name, and what is expected of each; `docs/models.md` has their layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from tests.kit.model import SIZES

VOCABULARY = 96
LONGEST = 100  # tokens of the servers' context

_SIZES = {**SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0}
_HEADS = {**_SIZES, "head_dim": 8}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SIGHT: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_CLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _longrope(**more: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors, **more}
    return {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": rope}


def _vision(config: Any, model: Any, text: Any, sight: Any, **more: Any) -> Callable[[], Any]:
    return lambda: model(config(text_config=text, vision_config=sight, **more))


TEXT: dict[str, Callable[[], Any]] = {
    "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZES)),
    "Mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_SIZES)),
    "Qwen2, tied": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "Qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_HEADS)),
    "Gemma 3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_HEADS, sliding_window=128)),
    "Phi-3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_SIZES, max_position_embeddings=128)),
    "Phi-3, LongRoPE": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_SIZES, **_longrope())),
    "OLMo 2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_SIZES)),
    "SmolLM3": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**_SIZES)),
    "GLM-4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**_HEADS)),
    "Granite (scales its logits)": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**_SIZES, logits_scaling=3.0)),
}
MIXTURES: dict[str, Callable[[], Any]] = {
    "Qwen3-MoE": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**_HEADS, **_EXPERTS)),
    "Mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_SIZES, **_LOCAL)),
    "OLMoE": lambda: tf.OlmoeForCausalLM(tf.OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2)),
    "DeepSeek-V3": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**{**_SIZES, **_LATENT}, **_DEEPSEEK)),
    "GLM-4-MoE": lambda: tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(**_HEADS, **_DEEPSEEK)),
}
VISION: dict[str, Callable[[], Any]] = {
    "Qwen2.5-VL": _vision(
        tf.Qwen2_5_VLConfig,
        tf.Qwen2_5_VLForConditionalGeneration,
        {**_SIZES, **_MROPE},
        {**_SIGHT, "fullatt_block_indexes": [0]},
    ),
    "Qwen3-VL": _vision(
        tf.Qwen3VLConfig,
        tf.Qwen3VLForConditionalGeneration,
        {**_HEADS, **_MROPE},
        {**_SIGHT, "deepstack_visual_indexes": [0]},
    ),
    "Gemma 3 with vision": _vision(
        tf.Gemma3Config,
        tf.Gemma3ForConditionalGeneration,
        {**_HEADS, "sliding_window": 128},
        _CLIP,
        mm_tokens_per_image=4,
    ),
    "LLaVA": lambda: _vision(
        tf.LlavaConfig, tf.LlavaForConditionalGeneration, tf.LlamaConfig(**_SIZES), tf.CLIPVisionConfig(**_CLIP)
    )(),
}
# Models whose sequences go through their layers as a batch: here no kernels keep them apart in a row.
PADDED: dict[str, Callable[[], Any]] = {
    "Qwen3-Next (linear attention)": lambda: tf.Qwen3NextForCausalLM(
        tf.Qwen3NextConfig(
            **_HEADS,
            **_EXPERTS,
            **_LINEAR,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        )
    ),
    "LFM2 (convolutions)": lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"])),
    "Mamba (a state)": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "Falcon (its own attention)": lambda: tf.FalconForCausalLM(
        tf.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ),
    "Llama 4 above its chunk": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**_HEADS, **_LOCAL, intermediate_size_mlp=48, attention_chunk_size=64)
    ),
}
# With the words of the refusal.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Phi-MoE, LongRoPE above its bound": (
        lambda: tf.PhimoeForCausalLM(
            tf.PhimoeConfig(**_SIZES, **_LOCAL, **_longrope(short_mscale=1.0, long_mscale=1.3))
        ),
        r"position embeddings look at the whole row. Lower vllm.max_model_len",
    ),
    "Llama, dynamic RoPE above its bound": (
        lambda: tf.LlamaForCausalLM(
            tf.LlamaConfig(
                **_SIZES,
                max_position_embeddings=64,
                rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            )
        ),
        r"vllm.max_model_len = 100: lower it to 64",
    ),
}
