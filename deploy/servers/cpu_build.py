"""What vLLM's CPU build (0.32) does with a model, as it was tried with tiny models of each architecture.

Its kernels are fewer than those of GPUs: some architectures end it, and of some its log-probs are others than the
learner's, so that no publication would be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from slipstream.protocol.config import ConfigError, RunConfig

# Types of models that were sampled, trained, published and proven, with log-probs of server and learner within 3e-5
# nats in float32. Those after the first two lines: in bfloat16, within what that rounds off. `llama` is SmolLM2-135M of
# examples/pretrained.
SERVED = (
    *("falcon_h1", "gemma2", "gemma4_text", "gpt_oss", "granite", "granitemoehybrid", "mixtral", "nemotron_h"),
    *("qwen2_5_vl", "qwen3", "qwen3_moe"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    "llama",
)

# With a prefix cache, vLLM keeps the states of layers of this kind (`MambaMixer2`) at the end of each block. The CPU
# build's scan does not return them: a prompt longer than a block ends the server.
_MAMBA_2 = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
_GATED_DELTA = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")

Facts = Mapping[str, Any]


def flags(architecture: Facts) -> list[str]:
    """Return the flags without which a model's rollouts would end the server.

    Args:
        architecture: The model's config.json.
    """
    return ["--no-enable-prefix-caching"] if _text(architecture).get("model_type") in _MAMBA_2 else []


def check_served(config: RunConfig, architecture: Facts) -> None:
    """Raise `ConfigError` if the CPU build is known not to serve the run's model."""
    if (why := obstacle(architecture, config.model.dtype)) is not None:
        raise ConfigError(f"model.path = {config.model.path}: {why}")


def is_served(architecture: Facts) -> bool:
    """Return whether a model of the architecture was served."""
    return bool({architecture.get("model_type"), _text(architecture).get("model_type")} & set(SERVED))


def obstacle(architecture: Facts, dtype: str) -> str | None:
    """Return why the CPU build does not serve a model, and what to do; None if nothing is known against it."""
    text = _text(architecture)
    find = _OBSTACLES.get(str(text.get("model_type")))
    return None if find is None else find(text, dtype)


def _text(architecture: Facts) -> Facts:
    part = architecture.get("text_config")
    return part if isinstance(part, Mapping) else architecture


_ELSEWHERE = "serve it by GPUs, or take another model"


def _gated_delta(text: Facts, dtype: str) -> str | None:
    if dtype != "bfloat16":
        return f'vLLM computes its linear attention on a CPU in bfloat16, not {dtype}: set model.dtype = "bfloat16"'
    heads = [text.get("linear_key_head_dim", 128), text.get("linear_value_head_dim", 128)]
    if heads != [128, 128]:
        return (
            f"vLLM computes its linear attention on a CPU with heads of 128 channels alone, not {heads}: {_ELSEWHERE}"
        )
    return None


def _gpt_oss(text: Facts, dtype: str) -> str | None:
    if "factor" in (text.get("rope_parameters") or text.get("rope_scaling") or {}):
        return None
    return (
        "its config.json names no factor of its rotary embedding, which vLLM's gpt_oss.py asks for: give it "
        "rope_parameters of the type yarn, as the published models have them"
    )


def _kimi_linear(text: Facts, dtype: str) -> str | None:
    return f"vLLM's CPU build cannot load it next to numba: {_ELSEWHERE}" if find_spec("numba") else None


def _lfm2(text: Facts, dtype: str) -> str | None:
    return f"vLLM's CPU build turns only its first head by position, 0.3 to 0.6 nats off the learner: {_ELSEWHERE}"


def _gemma3n(text: Facts, dtype: str) -> str | None:
    return f"vLLM's log-probs of it are 0.3 nats off the learner's: {_ELSEWHERE}"


def _nemotron_h(text: Facts, dtype: str) -> str | None:
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    kinds = [kind for name in names for kind in text.get(name) or ()]
    if text.get("n_routed_experts") and ("moe" in kinds or "E" in kinds):
        return f"vLLM computes its experts on GPUs alone: {_ELSEWHERE}"
    return None


def _mamba(text: Facts, dtype: str) -> str | None:
    return f"vLLM's CPU build has no kernel for its Mamba layers (selective_scan_fwd): {_ELSEWHERE}"


_OBSTACLES: Mapping[str, Callable[[Facts, str], str | None]] = {
    **dict.fromkeys(_GATED_DELTA, _gated_delta),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), _mamba),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    "gemma3n_text": _gemma3n,
    "gpt_oss": _gpt_oss,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
}
