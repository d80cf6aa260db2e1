"""What two processes must share, and what is told where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from slipstream.protocol.config import ConfigError, fingerprint
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
    assert "the chat format, its template or its parser differs" in str(fingerprint.difference(OURS, template))
    warmer = fingerprint.of(config(rollout={"temperature": 0.5}), build_tokenizer())
    assert fingerprint.difference(OURS, warmer) == "rollout.temperature = 0.5, the run has 1.0"
    longer = fingerprint.of(config(vllm={"max_model_len": 2048}), build_tokenizer())
    assert fingerprint.difference(OURS, longer) == "vllm.max_model_len = 2048, the run has 4096"
    by_turn = fingerprint.of(config(learner={"credit": "turn"}), build_tokenizer())
    assert "learner.credit = None" in str(fingerprint.difference(by_turn, OURS)), "it would not say where turns end"
    assert (
        fingerprint.difference(by_turn, fingerprint.of(config(learner={"credit": "gigpo"}), build_tokenizer())) is None
    )


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


@pytest.mark.parametrize(
    ("setting", "chat"),
    [
        ("template", lambda file: {"template": file}),
        ("parser", lambda file: {"parser": f"{file}:f"}),
        ("import_path", lambda file: {"renderer": "custom", "renderer_options": {"import_path": f"{file}:f"}}),
    ],
)
def test_i10_the_files_of_the_chat_format_count_by_what_they_hold(setting: str, chat: Any, tmp_path: Path) -> None:
    """Two workers whose parser of one name differs would read different calls in one run."""
    one, copy, newer, gone = (tmp_path / f"{name}.py" for name in ("one", "copy", "newer", "gone"))
    for file, text in ((one, "def f(text): return []"), (copy, "def f(text): return []"), (newer, "f = list")):
        file.write_text(text)
    first, second, third = (fingerprint.of(config(chat=chat(file)), build_tokenizer()) for file in (one, copy, newer))
    assert fingerprint.difference(first, second) is None, "where a file lies is each machine's own"
    assert "its parser differs" in str(fingerprint.difference(first, third))
    with pytest.raises(ConfigError, match=rf"chat\..*{setting} = {gone}: the file cannot be read .*; give a text file"):
        fingerprint.of(config(chat=chat(gone)), build_tokenizer())


def test_i10_another_function_of_the_same_parser_file_is_another_chat_format(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("f = g = list")
    one, other = (
        fingerprint.of(config(chat={"parser": f"{tmp_path}/p.py:{name}"}), build_tokenizer()) for name in "fg"
    )
    assert fingerprint.difference(one, other)


def test_i10_another_end_of_turn_is_another_tokenizer() -> None:
    """Turns would end elsewhere, under the same vocabulary."""
    tokenizer = build_tokenizer()
    tokenizer.eos_token = "<|im_start|>"
    assert "the tokenizer differs" in str(fingerprint.difference(OURS, fingerprint.of(config(), tokenizer)))


def test_a_release_may_differ() -> None:
    assert fingerprint.difference(OURS, msgspec.structs.replace(OURS, release="0.0.1")) is None


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint.digest({"a": 1, "b": [2]}) == fingerprint.digest({"b": [2], "a": 1})
    assert fingerprint.digest({"a": 1}) != fingerprint.digest({"a": 2})
