"""Makes a small config of an architecture from a config of it in any size: few layers, one of each kind, and narrow.

A model of it has the same code and computes in the same way, so that what the learner does with it is what it will do
with the large one. It takes a second to find out, and no weights.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 96

_NAMES: dict[int, str] = {
    VOCABULARY: "vocab_size",
    32: "hidden_size n_embd d_model dim embed_dim embedding_size model_dim word_embed_proj_dim attention_hidden_size "
    "out_hidden_size",
    64: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size feed_forward_hidden_size shared_intermediate_size "
    "decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp prefix_dense_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads multi_query_group_num num_global_key_value_heads "
    "num_experts_per_tok moe_top_k num_experts_per_token moe_k top_k_experts linear_num_value_heads "
    "linear_num_key_heads",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts state_size mamba_d_state ssm_state_size d_state rotary_dim",
    8: "head_dim attention_head_dim kv_channels global_head_dim kv_lora_rank q_lora_rank qk_rope_head_dim "
    "qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size expert_intermediate_size",
    1: "n_group topk_group n_shared_experts first_k_dense_replace num_shared_experts bos_token_id eos_token_id",
    0: "pad_token_id",
    128: "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len original_max_position_embeddings "
    "max_target_positions seq_length sliding_window",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}

# Lists with one entry for each layer: of each kind of layer there is one.
_KINDS = ("layer_types", "layers_block_type", "block_types", "attention_types", "mlp_layer_types")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")

# What a config says of how its layers compute, as against how large they are.
_MANNER = (bool, str, float)

# Attention whose keys and values are made from a compressed vector: as many of them as queries, of other widths.
_LATENT = {
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear"),
    *("longcat_flash", "minicpm3", "youtu"),
}
# Encoders that can be made causal.
_ENCODERS = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod"),
}
# Half of a head, among time, height and width.
_MROPE = [2, 1, 1]
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 16}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0}
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "deepseek_v2": {"topk_method": "greedy", "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        **_PER_LAYER,
        "intermediate_size": [64, 64],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {**_PER_LAYER, "head_dim": 8, "global_head_dim": 8, "per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA,
    "lfm2_moe": {"num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 8, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def small(config: PretrainedConfig) -> PretrainedConfig:
    """Return a small config of the same architecture, with layers of the same kinds that compute in the same way."""
    found = type(config)(**{**_manner(config), **_sizes(config)})
    if (own := getattr(config, "auto_map", None)) is not None:  # where the model's own code stands
        found.auto_map = own
    return found


def _manner(config: PretrainedConfig) -> dict[str, Any]:
    """Return what a config says otherwise than its class, other than sizes and parts."""
    usual = type(config)()

    def counts(name: str, value: Any) -> bool:
        if name.startswith("_") or name in _SIZES or value == getattr(usual, name, None):
            return False
        return isinstance(value, _MANNER) or (
            name == "rope_parameters" and isinstance(value, dict) and not _has_lists(value)
        )

    return {name: value for name, value in vars(config).items() if counts(name, value)}


def _has_lists(rope: dict[str, Any]) -> bool:
    """Whether parameters hold one value for each frequency, of which a narrow head has fewer."""
    return any(isinstance(value, list) or (isinstance(value, dict) and _has_lists(value)) for value in rope.values())


def _sizes(default: PretrainedConfig) -> dict[str, Any]:
    """Return the sizes in place of a config's own, those of its parts as well."""
    model_type = default.model_type
    found: dict[str, Any] = {}
    for name, size in _SIZES.items():
        try:
            value = getattr(default, name, None)
        except Exception:  # one value for each layer: the error differs with the config
            continue
        if _can_be_set(default, name) and (value is not None or name == "head_dim") and not isinstance(value, list):
            found[name] = size
    if model_type in _LATENT:
        found.pop("head_dim", None)
        found["num_key_value_heads"] = 4
    for name in _KINDS:
        kinds = getattr(default, name, None)
        if isinstance(kinds, list) and kinds and isinstance(kinds[0], str) and _can_be_set(default, name):
            each = list(dict.fromkeys(kinds))
            found[name] = each if len(each) > 1 else each * 2
            found |= {depth: len(found[name]) for depth in _DEPTHS if depth in found}
    if model_type in _ENCODERS:
        found["is_decoder"] = True
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        found["rope_parameters"] = {**rope, "mrope_section": _MROPE}
    # Tokens with their own meaning, such as that which stands for images: ids that differ, from the highest down.
    named = [name for name, value in vars(default).items() if name.endswith("_token_id") and isinstance(value, int)]
    found |= {name: VOCABULARY - 1 - place for place, name in enumerate(sorted({*named} - _SIZES.keys()))}
    parts = {name: value for name, value in vars(default).items() if isinstance(value, PretrainedConfig)}
    found |= {name: _sizes(part) for name, part in parts.items()}
    return found | _MORE.get(model_type, {})


def _can_be_set(config: PretrainedConfig, name: str) -> bool:
    own = getattr(type(config), getattr(config, "attribute_map", {}).get(name, name), None)
    return not isinstance(own, property) or own.fset is not None
