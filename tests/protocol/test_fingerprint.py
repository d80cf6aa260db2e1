"""What two processes must share, and what is told where they do not."""

from __future__ import annotations

import json

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from protocol import fingerprint
from tests.kit import config
from tests.kit.fake_vllm.tokenizer import build_tokenizer

OURS = fingerprint.of(config(), build_tokenizer())


def with_two_digits_swapped() -> PreTrainedTokenizerFast:
    rules = json.loads(build_tokenizer().backend_tokenizer.to_str())
    vocabulary = rules["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    template = build_tokenizer().chat_template
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)), chat_template=template, eos_token="<|im_end|>"
    )


def test_the_same_files_give_the_same_fingerprint_whatever_was_tokenised_before() -> None:
    tokenizer = build_tokenizer()
    tokenizer(["a text", "a longer text"], padding=False, truncation=True, max_length=3)
    assert fingerprint.difference(OURS, fingerprint.of(config(), tokenizer)) is None


def test_another_tokenizer_template_or_setting_is_named() -> None:
    swapped = fingerprint.of(config(), with_two_digits_swapped())
    assert "the tokenizer differs" in str(fingerprint.difference(OURS, swapped))
    template = fingerprint.of(config(), build_tokenizer("{{ messages[0].content }}"))
    assert "template differs" in str(fingerprint.difference(OURS, template))
    warmer = fingerprint.of(config(rollout={"temperature": 0.5}), build_tokenizer())
    assert fingerprint.difference(OURS, warmer) == "rollout.temperature = 0.5, the run has 1.0"
    longer = fingerprint.of(config(vllm={"max_model_len": 2048}), build_tokenizer())
    assert fingerprint.difference(OURS, longer) == "vllm.max_model_len = 2048, the run has 4096"


def test_what_the_learner_alone_does_with_rollouts_makes_no_difference() -> None:
    others = config(rollout={"mask_truncated": True, "accept_sampler_mismatch": True, "give_up_after": 3})
    assert fingerprint.difference(OURS, fingerprint.of(others, build_tokenizer())) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rows": 11, "data": "x"}, "the data set has 11 rows, the run's has 10"),
        ({"rows": 10, "data": "y"}, "rows of the data set differ: y, the run has x"),
        ({"rows": 10, "data": "x", "task": "another"}, None),
        ({}, None),
    ],
)
def test_data_sets_are_compared_where_both_are_known_and_a_task_file_may_change(
    changes: dict[str, object], told: str | None
) -> None:
    known = msgspec.structs.replace(OURS, rows=10, data="x", task="one")
    assert fingerprint.difference(known, msgspec.structs.replace(OURS, **changes)) == told


def test_a_release_may_differ() -> None:
    assert fingerprint.difference(OURS, msgspec.structs.replace(OURS, release="0.0.1")) is None


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint.digest({"a": 1, "b": [2]}) == fingerprint.digest({"b": [2], "a": 1})
    assert fingerprint.digest({"a": 1}) != fingerprint.digest({"a": 2})
