"""What `[lora]` names is there: layers that cannot have an adapter, and names of none, are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from protocol.config import ConfigError
from tests.kit.model import tiny_model
from tests.learner.families import VISION
from tests.learner.test_adapter import adapted


@pytest.mark.parametrize(
    ("lora", "tied", "says"),
    [
        ({"target_modules": ["lm_head"]}, False, r"lm_head is the output layer.*modules_to_save"),
        ({"target_modules": ["embed_tokens"]}, False, r"embed_tokens is a Embedding.*only linear layers"),
        (
            {"target_modules": ["nonsense"]},
            False,
            r"lora.target_modules = \['nonsense'\]: Qwen3ForCausalLM has no layer nonsense; choose from .*q_proj",
        ),
        (
            {"target_modules": "nonsense", "use_dora": True},
            False,
            r"target_modules = nonsense, lora.use_dora = True: no adapter of this kind fits",
        ),
        ({"target_modules": ["q_proj", "nonsense"]}, False, "has no layer nonsense"),
        ({"exclude_modules": ["nonsense"]}, False, r"lora.exclude_modules = \['nonsense'\].*has no layer nonsense"),
        ({"modules_to_save": ["nonsense"]}, False, r"lora.modules_to_save = \['nonsense'\].*has no layer nonsense"),
        ({"rank_pattern": {"nosuch": 8}}, False, r"rank_pattern = {'nosuch': 8}: nosuch is no layer that has an"),
        (
            {"alpha_pattern": {"norm": 8}},
            False,
            r"alpha_pattern = {'norm': 8}: norm is no layer.*choose from down_proj",
        ),
        ({"layers_to_transform": [99]}, False, r"lora.layers_to_transform = \[99\]: no adapter of this kind fits"),
        ({"layers_to_transform": [0, 2]}, False, r"layers_to_transform = \[0, 2\]: no layer 2 has an adapter"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [1]}, False, "cannot be used when `target_modules` is"),
        ({"modules_to_save": ["lm_head"]}, True, r"modules_to_save = \['lm_head'\].*shares its weight with"),
        ({"modules_to_save": ["embed_tokens"]}, True, r"embed_tokens shares its weight with lm_head"),
    ],
    ids=str,
)
def test_layers_that_cannot_have_an_adapter_are_refused(
    lora: dict[str, Any], tied: bool, says: str, tmp_path: Path
) -> None:
    tiny_model(tie_word_embeddings=tied).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=says):
        adapted(tmp_path, **lora)


def test_numbers_of_layers_go_with_all_linear(model_path: Path) -> None:
    """Which is an expression to peft, with which it takes none."""
    policy = adapted(model_path, layers_to_transform=[1], rank_pattern={"q_proj": 2})
    trains = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    whole = {name for name, weight in adapted(model_path).named_parameters() if weight.requires_grad}
    assert trains == {name for name in whole if ".1." in name}


def test_numbers_of_layers_do_not_go_with_a_model_that_sees(tmp_path: Path) -> None:
    name, make = next(iter(VISION.items()))
    make().save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"layers_to_transform = \[1\].*has layers of images.*layers.*\(1\)"
    ) as raised:
        adapted(tmp_path, layers_to_transform=[1])
    (expression,) = re.findall("'(.*)'", str(raised.value))
    policy = adapted(tmp_path, target_modules=expression)
    assert [of for of, weight in policy.named_parameters() if weight.requires_grad], name
