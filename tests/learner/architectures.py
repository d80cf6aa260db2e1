"""A tiny random model of every architecture that transformers' AutoModelForCausalLM knows, and what the learner does
with each: the table of `docs/trained_models.md`."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.learner.families import VOCABULARY

_NAMES: dict[int, str] = {
    VOCABULARY: "vocab_size",
    32: "hidden_size n_embd d_model dim embed_dim embedding_size model_dim word_embed_proj_dim attention_hidden_size",
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
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 16}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0}
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "deepseek_v2": {"topk_method": "greedy", "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        **_PER_LAYER,
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": [64, 64],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {**_PER_LAYER, "head_dim": 8, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "nemotron": {"num_key_value_heads": 2},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 8, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}

ARCHITECTURES = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}


class NotTiny(Exception):
    """A small model of this architecture cannot be made by sizes alone."""


def tiny(model_type: str) -> Any:
    """Make a network. Raises `NotTiny` with the reason if it cannot be made."""
    kind = ARCHITECTURES[model_type]
    try:
        config = kind(**_small(kind(), model_type))
        return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}") from error


def _small(default: PretrainedConfig, model_type: str) -> dict[str, Any]:
    """Return the sizes in place of a config's own, those of its parts as well."""
    found: dict[str, Any] = {}
    for name, size in _SIZES.items():
        try:
            value = getattr(default, name, None)
        except AttributeError:  # one value for each layer
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
    parts = {name: value for name, value in vars(default).items() if isinstance(value, PretrainedConfig)}
    found |= {name: _small(part, part.model_type) for name, part in parts.items()}
    return found | _MORE.get(model_type, {})


def _can_be_set(config: PretrainedConfig, name: str) -> bool:
    own = getattr(type(config), getattr(config, "attribute_map", {}).get(name, name), None)
    return not isinstance(own, property) or own.fset is not None


# What the learner does: the layout in which it trains an architecture, "refused", or "not built" where sizes alone make
# no small model of it.
# What the learner does: the layout in which it trains an architecture, "refused", or "not built" where sizes alone make
# no small model of it.
RESULTS: dict[str, str] = {
    "afmoe": "trie",
    "apertus": "trie",
    "arcee": "trie",
    "aria_text": "trie",
    "axk1": "trie",
    "axk2": "padded",
    "bamba": "padded",
    "bart": "padded",
    "bert": "trie",
    "bert-generation": "trie",
    "big_bird": "padded",
    "bigbird_pegasus": "padded",
    "biogpt": "trie",
    "bitnet": "trie",
    "blenderbot": "padded",
    "blenderbot-small": "padded",
    "bloom": "padded",
    "blt": "refused",
    "camembert": "padded",
    "codegen": "padded",
    "cohere": "trie",
    "cohere2": "trie",
    "cohere2_moe": "trie",
    "cohere_compass_text": "not built",
    "cpmant": "refused",
    "ctrl": "trie",
    "cwm": "trie",
    "data2vec-text": "padded",
    "dbrx": "not built",
    "deepseek_v2": "trie",
    "deepseek_v3": "trie",
    "deepseek_v32": "padded",
    "deepseek_v4": "padded",
    "diffllama": "trie",
    "doge": "padded",
    "dots1": "not built",
    "electra": "trie",
    "emu3": "refused",
    "ernie": "trie",
    "ernie4_5": "trie",
    "ernie4_5_moe": "trie",
    "exaone4": "trie",
    "exaone_moe": "trie",
    "falcon": "padded",
    "falcon_h1": "padded",
    "falcon_mamba": "padded",
    "flex_olmo": "trie",
    "fuyu": "trie",
    "gemma": "trie",
    "gemma2": "padded",
    "gemma3": "trie",
    "gemma3_text": "trie",
    "gemma3n": "not built",
    "gemma3n_text": "trie",
    "gemma4": "not built",
    "gemma4_assistant": "not built",
    "gemma4_text": "not built",
    "gemma4_unified": "not built",
    "gemma4_unified_assistant": "not built",
    "gemma4_unified_text": "not built",
    "git": "padded",
    "glm": "trie",
    "glm4": "trie",
    "glm4_moe": "trie",
    "glm4_moe_lite": "trie",
    "glm_moe_dsa": "padded",
    "got_ocr2": "refused",
    "gpt2": "trie",
    "gpt_bigcode": "trie",
    "gpt_neo": "padded",
    "gpt_neox": "trie",
    "gpt_neox_japanese": "padded",
    "gpt_oss": "padded",
    "gptj": "padded",
    "granite": "trie",
    "granite_swa": "padded",
    "granitemoe": "trie",
    "granitemoe_swa": "padded",
    "granitemoehybrid": "padded",
    "granitemoeshared": "trie",
    "helium": "trie",
    "hrm_text": "trie",
    "hunyuan_v1_dense": "trie",
    "hunyuan_v1_moe": "trie",
    "hy_v3": "trie",
    "hy_v4": "padded",
    "hyperclovax": "trie",
    "inkling_text": "padded",
    "jais2": "trie",
    "jamba": "padded",
    "jetmoe": "trie",
    "kimi_linear": "padded",
    "laguna": "trie",
    "lfm2": "trie",
    "lfm2_moe": "padded",
    "llama": "trie",
    "llama4": "trie",
    "llama4_text": "trie",
    "longcat_flash": "refused",
    "mamba": "padded",
    "mamba2": "padded",
    "marian": "padded",
    "mbart": "padded",
    "megatron-bert": "padded",
    "mellum": "trie",
    "mimo_v2_flash": "padded",
    "minicpm3": "trie",
    "minimax": "padded",
    "minimax_m2": "trie",
    "minimax_m3_vl_text": "trie",
    "ministral": "trie",
    "ministral3": "trie",
    "mistral": "trie",
    "mixtral": "trie",
    "mllama": "refused",
    "modernbert-decoder": "trie",
    "moshi": "padded",
    "mpt": "padded",
    "musicgen": "not built",
    "musicgen_melody": "not built",
    "mvp": "padded",
    "nanochat": "trie",
    "nemotron": "padded",
    "nemotron_h": "padded",
    "olmo": "trie",
    "olmo2": "trie",
    "olmo3": "trie",
    "olmo_hybrid": "padded",
    "olmoe": "trie",
    "openai-gpt": "padded",
    "opt": "trie",
    "pegasus": "padded",
    "persimmon": "trie",
    "phi": "trie",
    "phi3": "trie",
    "phi4_multimodal": "trie",
    "phimoe": "trie",
    "plbart": "padded",
    "prophetnet": "not built",
    "qwen2": "trie",
    "qwen2_moe": "trie",
    "qwen3": "trie",
    "qwen3_5": "padded",
    "qwen3_5_moe": "padded",
    "qwen3_5_moe_text": "padded",
    "qwen3_5_text": "padded",
    "qwen3_moe": "trie",
    "qwen3_next": "padded",
    "qwen4_exp": "not built",
    "qwen4_exp_text": "not built",
    "recurrent_gemma": "padded",
    "reformer": "not built",
    "rembert": "padded",
    "roberta": "padded",
    "roberta-prelayernorm": "padded",
    "roc_bert": "trie",
    "roformer": "padded",
    "rwkv": "padded",
    "seed_oss": "trie",
    "smollm3": "trie",
    "solar_open": "trie",
    "stablelm": "padded",
    "starcoder2": "trie",
    "trocr": "padded",
    "vaultgemma": "padded",
    "whisper": "trie",
    "xglm": "padded",
    "xlm": "refused",
    "xlm-roberta": "padded",
    "xlm-roberta-xl": "padded",
    "xlnet": "not built",
    "xlstm": "padded",
    "xmod": "refused",
    "youtu": "trie",
    "zamba": "not built",
    "zamba2": "padded",
    "zaya": "padded",
}
