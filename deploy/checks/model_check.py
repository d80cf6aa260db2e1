"""Checks the model before a run starts: that it loads, and that vLLM and the learner can use it.

Only its config is read, and the headers of its weights, which say how long the files are.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, ModelSection, RunConfig

# Names that configs use for the longest context. The first that a config has counts.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

# Fields of a config that decide the names and shapes of the weights.
_SHAPES = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)

# Kinds of rotary scaling whose factor the length already includes (vllm 0.32, `_get_and_verify_max_len`).
_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def check_model(config: RunConfig) -> None:
    """Raise `ConfigError` if the model cannot be loaded, is given too long a context, or lacks `model.attention`."""
    model = config.model
    architecture = read_architecture(model)
    if not config.vllm.servers and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        longest = longest_context(architecture)
        if longest is not None and config.vllm.max_model_len > longest:
            raise ConfigError(
                f"vllm.max_model_len = {config.vllm.max_model_len} is more than the model's {longest}: vLLM would "
                f"refuse to start; lower it to at most {longest}"
            )
    if Path(model.path).is_absolute() and (cut_off := find_cut_off_weights(Path(model.path))) is not None:
        raise ConfigError(cut_off)
    if model.attention != ModelSection.model_fields["attention"].default:
        _check_attention(architecture, model)


def find_cut_off_weights(folder: Path) -> str | None:
    """Name weights of a model folder that are missing or cut off, as those of a copy that was stopped; None if all are
    whole."""
    from safetensors import SafetensorError, safe_open

    files = {*folder.glob("*.safetensors")}
    for index in folder.glob("*.safetensors.index.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            files |= {folder / name for name in json.loads(index.read_bytes()).get("weight_map", {}).values()}
    for file in sorted(files):
        if not file.is_file():
            return f"model.path = {folder}: its weights {file.name} are missing; copy the folder again"
        try:
            with safe_open(file, "np"):
                pass
        except SafetensorError as error:
            return (
                f"model.path = {folder}: {file.name} has {file.stat().st_size:,} bytes, so it is cut off or no "
                f"safetensors file ({error}); copy it again"
            )
    return None


def check_resumed(config: RunConfig, resume: bool) -> None:
    """Raise `ConfigError` if `model.path` has another shape than the newest checkpoint.

    The servers start with `model.path`, and could not take the checkpoint's weights. Only config files are compared.
    """
    kept = checkpoints.complete(config.run_dir) if resume else {}
    if not kept:
        return
    saved = kept[max(kept)] / checkpoints.MODEL
    try:
        was = read_architecture(config.model.model_copy(update={"path": str(saved.absolute()), "revision": None}))
    except ConfigError:
        return  # a resume skips a damaged checkpoint
    differing = _differences(was.get_text_config(), read_architecture(config.model).get_text_config())
    if differing:
        raise ConfigError(
            f"model.path = {config.model.path} is another model than {saved.parent} was made with: "
            f"{', '.join(differing)}; continue with the model.path of before, or begin a new run with --run.name"
        )


def _differences(was: Any, now: Any) -> list[str]:
    pairs = ((name, getattr(was, name, None), getattr(now, name, None)) for name in _SHAPES)
    return [f"{name} = {new} (was {old})" for name, old, new in pairs if old != new]


def context_of(path: str) -> int | None:
    """Return the model's context in tokens, None if its config does not say. Raises `ConfigError` if it has none."""
    return longest_context(read_architecture(ModelSection(path=path)))


def longest_context(architecture: Any) -> int | None:
    """Return the context in tokens that a transformers config allows, scaling included; None if it does not say."""
    text = architecture.get_text_config()
    length = next((value for name in _LENGTHS if (value := getattr(text, name, None))), None)
    if length is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    # A config has one set of rotary parameters, or one for each type of layer.
    for parameters in [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]:
        if parameters.get("rope_type") not in _SCALED and not text.model_type.startswith("gemma3"):
            return max(int(length * (parameters.get("factor") or 1)), getattr(text, "model_max_length", None) or 0)
    return max(int(length), getattr(text, "model_max_length", None) or 0)


def read_architecture(model: ModelSection) -> Any:
    """Return the transformers config of the model. Raises `ConfigError` if it has none that can be read."""
    from transformers import AutoConfig

    path = model.path
    if Path(path).is_absolute() and not Path(path, "config.json").is_file():
        lack = "the folder holds no config.json" if Path(path).is_dir() else "there is no such folder"
        raise ConfigError(f"model.path = {path}: {lack}; give an existing model folder or a hub name")
    try:
        return AutoConfig.from_pretrained(
            path, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        revision = f", model.revision = {model.revision}" if model.revision else ""
        remedy = "give an existing model folder or a hub name"
        if "trust_remote_code" in str(error) and not model.trust_remote_code:
            remedy = "read that code, and if you trust it set model.trust_remote_code = true"
        elif "couldn't connect" in str(error):
            remedy = (
                f"give the path of a model folder, or fetch it first where the hub can be reached: hf download {path}"
            )
        elif model.revision:
            remedy += ", and a branch, tag or commit that it has"
        raise ConfigError(f"model.path = {path}{revision}: not a model that can be loaded: {first}; {remedy}") from None


def _check_attention(architecture: Any, model: ModelSection) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):  # the class checks the attention, and no weight takes memory
            AutoModelForCausalLM.from_config(
                architecture, attn_implementation=model.attention, trust_remote_code=model.trust_remote_code
            )
    except (ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.attention = {model.attention}: the model cannot use it: {first}") from None
