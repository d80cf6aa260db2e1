"""Which sampling settings a run file may hold: those that the learner can follow, or all of them, by choice."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from slipstream.protocol.config.sections import sampling
from slipstream.protocol.config.sections.sampling import GenerationKwargs, mismatches, typed
from slipstream.rollout_worker.inference.wire import SamplingParams
from tests.kit import config

OFF: dict[str, dict[str, Any]] = {
    "rollout.top_p = 0.9": {"top_p": 0.9},
    "rollout.top_k = 129": {"top_k": 129},
    "rollout.min_p = 0.05": {"min_p": 0.05},
    "rollout.repetition_penalty = 1.1": {"repetition_penalty": 1.1},
    "rollout.presence_penalty = -0.5": {"presence_penalty": -0.5},
    "rollout.frequency_penalty = 0.5": {"frequency_penalty": 0.5},
    "rollout.generation_kwargs.min_tokens = 4": {"generation_kwargs": {"min_tokens": 4}},
    "rollout.generation_kwargs.bad_words = ['um']": {"generation_kwargs": {"bad_words": ["um"]}},
    "rollout.generation_kwargs.logit_bias = {'7': -5.0}": {"generation_kwargs": {"logit_bias": {"7": -5}}},
    "rollout.generation_kwargs.allowed_token_ids = [1, 2]": {"generation_kwargs": {"allowed_token_ids": [1, 2]}},
    "rollout.generation_kwargs.structured_outputs": {"generation_kwargs": {"structured_outputs": {"regex": "a"}}},
    "rollout.generation_kwargs.thinking_token_budget": {"generation_kwargs": {"thinking_token_budget": 9}},
    "rollout.generation_kwargs.watermarking = True": {"generation_kwargs": {"watermarking": True}},
    "rollout.generation_kwargs.extra_args": {"generation_kwargs": {"extra_args": {"a": 1}}},
}
# Off settings that a sampling mask tells the learner of.
LEAVE_OUT = (
    *("top_p", "top_k", "min_p"),
    *("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "thinking_token_budget"),
)
NEUTRAL: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_p": 1, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
    {"top_k": sampling.ANY_VOCABULARY},
    {"top_k": 128, "top_p": 0.5, "min_p": 0.2},
    {"top_k": 1, "generation_kwargs": {"min_tokens": 4, "bad_words": ["um"], "structured_outputs": {"regex": "a"}}},
    {"stop": ["</answer>"]},
    {"generation_kwargs": {"bad_words": [], "logit_bias": {}, "min_tokens": 0, "watermarking": False}},
    {"generation_kwargs": {"repetition_detection": {"max_pattern_size": 4, "min_count": 8}}},
    {"generation_kwargs": {"skip_reading_prefix_cache": True}},
]


def fault(**rollout: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        config(rollout=rollout)
    return str(caught.value)


@pytest.mark.parametrize("told", OFF)
def test_what_the_learner_cannot_reproduce_is_refused_by_name_or_accepted_by_choice(told: str) -> None:
    message = fault(**OFF[told])
    assert told in message
    assert "the learner applies rollout.temperature alone" in message
    assert "rollout.accept_sampler_mismatch = true" in message
    assert ("rollout.top_k = 64, at most 128" in message) == any(name in told for name in LEAVE_OUT)
    accepted = config(rollout={**OFF[told], "accept_sampler_mismatch": True}).rollout
    assert [name for name in mismatches(accepted) if told.startswith(name)]


def test_all_that_are_off_are_named_at_once() -> None:
    assert "rollout.top_p = 0.9, rollout.min_p = 0.1: " in fault(top_p=0.9, min_p=0.1)


@pytest.mark.parametrize("rollout", NEUTRAL)
def test_what_leaves_the_distribution_as_it_is_needs_no_choice(rollout: dict[str, Any]) -> None:
    assert not mismatches(config(rollout=rollout).rollout)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seed": 1}, "generation_kwargs.seed = 1 is refused: .*run.seed"),
        ({"n": 4}, "generation_kwargs.n = 4 has its own setting: write it as rollout.group_size"),
        ({"max_tokens": 9}, "write it as rollout.max_turn_tokens"),
        ({"temperature": 1.0}, "write it as rollout.temperature"),
        ({"top_p": 0.9}, "write it as rollout.top_p"),
        ({"stop": ["a"]}, "write it as rollout.stop"),
        ({"stop_token_ids": [1]}, "stop_token_ids = .* is refused: .*set rollout.stop"),
        ({"logprobs": 5}, "logprobs = 5 is refused: Slipstream reads ids"),
        ({"detokenize": True}, "detokenize = True is refused"),
        ({"ignore_eos": True}, "ignore_eos = True is refused: it would do nothing"),
        ({"bad_word": ["a"]}, "bad_word is not a field of vLLM's SamplingParams; did you mean bad_words"),
        ({"minimum_tokens": 4}, "did you mean min_tokens"),
        ({"zebra": 1}, "it may hold min_tokens, bad_words"),
        ({"min_tokens": "5"}, "Expected `int`, got `str` - at `\\$.min_tokens`"),
        ({"min_tokens": -1}, "Expected `int` >= 0"),
        ({"min_tokens": 513}, "min_tokens = 513 is more than rollout.max_turn_tokens = 512"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"repetition_detection": {"nonsense": 1}}, "unknown field `nonsense` - at `\\$.repetition_detection`"),
        ({"repetition_detection": {"max_pattern_size": -3}}, "Expected `int` >= 0"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "min_count must be at least 2"),
        ({"repetition_detection": {"min_pattern_size": 3}}, "min_pattern_size is more than max_pattern_size"),
        ({"structured_outputs": {"regexp": "a"}}, "unknown field `regexp` - at `\\$.structured_outputs`"),
        ({"structured_outputs": {}}, "exactly one of json, regex, .* is needed"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of json, regex, .* is needed"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias.the: the key must be a token id"),
    ],
)
def test_generation_kwargs_are_checked_before_a_run_starts(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(rollout={"generation_kwargs": given, "accept_sampler_mismatch": True})


def test_watermarking_that_no_server_does_is_told() -> None:
    told = fault(generation_kwargs={"watermarking": True})
    assert "watermarking has no effect at all on servers without --watermark-config" in told


def test_an_empty_stop_text_is_refused() -> None:
    assert "rollout.stop holds an empty text" in fault(stop=["a", ""])


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_changes_or_refuses_is_refused_here(temperature: float) -> None:
    """vLLM 0.32 raises one below 0.01 to 0.01 without a word, and answers 400 above 2."""
    assert "temperature" in fault(temperature=temperature)


def test_keys_and_values_come_typed() -> None:
    rollout = config(
        rollout={"generation_kwargs": {"logit_bias": {"7": -100}}, "accept_sampler_mismatch": True}
    ).rollout
    assert typed(rollout.generation_kwargs) == GenerationKwargs(logit_bias={"7": -100.0})


def fields_in_vllm(name: str) -> dict[str, ast.expr | None]:
    """The fields of a class of vLLM's sampling_params.py, with their defaults."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    tree = ast.parse(Path(found.origin).with_name("sampling_params.py").read_text(encoding="utf-8"))
    (params,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        field.target.id: field.value
        for field in params.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    }


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("StructuredOutputsParams", sampling.StructuredOutputs),
        ("RepetitionDetectionParams", sampling.RepetitionDetection),
    ],
)
def test_tables_within_the_sampling_params_have_vllm_s_keys_and_defaults(name: str, ours: type[msgspec.Struct]) -> None:
    """vLLM ignores a key that it does not know."""
    theirs = {key: ast.literal_eval(value) for key, value in fields_in_vllm(name).items() if value is not None}
    assert theirs == {field.name: field.default for field in msgspec.structs.fields(ours)}


def test_every_field_of_vllm_s_sampling_params_is_answered_for_with_its_default() -> None:
    """Read from the source of the vLLM that is installed: importing it would take seconds."""
    theirs = fields_in_vllm("SamplingParams")
    assert len(theirs) > 30
    answered = {*GenerationKwargs.__struct_fields__, *sampling.REFUSED, *sampling.OWN_SETTING}
    assert set(theirs) <= answered, f"not answered for: {set(theirs) - answered}"
    for field in msgspec.structs.fields(SamplingParams):
        assert field.name in theirs
        if field.default is not msgspec.NODEFAULT:
            value = theirs[field.name]
            assert isinstance(value, ast.Constant | ast.List)
            assert field.default == ast.literal_eval(value), field.name
