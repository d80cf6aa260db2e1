"""Names in [lora] that the model does not have: refused before any weight is loaded, with what was meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.learner.checkpoints import resuming
from slipstream.protocol.config import ConfigError
from tests.kit import LEARNER, config
from tests.kit.model import tiny_model
from tests.learner.families import MIXTURES, PADDED, TEXT, VISION
from tests.learner.model.test_adapter import adapted

pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
LINEAR = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


@pytest.fixture(scope="module")
def structure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("structure")
    tiny_model().config.save_pretrained(folder)
    return folder


def check(folder: Path, **lora: Any) -> None:
    resuming.check_adapter(config(LEARNER, model={"path": str(folder)}, lora={"r": 4, **lora}), resume=False)


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (
            {"target_modules": ["q_proj", "v_prj"]},
            'lora.target_modules = ["q_proj", "v_prj"]: nothing in the model is called v_prj; did you mean v_proj? the '
            f"model's linear layers are {LINEAR}",
        ),
        ({"target_modules": ["q_prj"]}, 'lora.target_modules = ["q_prj"]: nothing in the model is called q_prj; did'),
        ({"target_modules": ["self_attn"]}, f"is called self_attn; the model's linear layers are {LINEAR}"),
        ({"target_modules": "q_proj"}, 'a text is a regular expression of whole names; write a list: ["q_proj"]'),
        (
            {"target_modules": r".*\.(nothing)"},
            "no whole name of a layer fits this regular expression; the model's linear layers are q_proj, k_proj, "
            "v_proj, o_proj, gate_proj, up_proj, down_proj; a whole name is model.layers.0.self_attn.q_proj",
        ),
        ({"modules_to_save": ["lm_hed"]}, "is called lm_hed; did you mean lm_head? it has model, embed_tokens, layers"),
        ({"exclude_modules": ["nothere"]}, 'lora.exclude_modules = ["nothere"]: nothing in the model is called'),
        ({"exclude_modules": ["self_attn"]}, "is called self_attn; the model's linear layers are"),
        ({"rank_pattern": {"q_prj": 4}}, 'lora.rank_pattern = {"q_prj" = 4}: nothing in the model is called q_prj'),
        (
            {"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 4}},
            "is called v_proj; did you mean q_proj? the adapter's layers are q_proj",
        ),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [1, 7]},
            "lora.layers_to_transform = [1, 7]: there is no layer 7; the model's are 0 to 1",
        ),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "no adapter of this kind fits Qwen3ForCausal"),
    ],
    ids=str,
)
def test_what_is_not_in_the_model_is_refused_by_its_structure_alone(
    structure: Path, lora: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check(structure, **lora)
    assert says in str(error.value)


def test_tied_weights_are_known_by_the_structure(tmp_path: Path) -> None:
    tiny_model(tie_word_embeddings=True).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"modules_to_save = \['lm_head'\].*shares its weight with"):
        check(tmp_path, modules_to_save=["lm_head"])


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q_proj", "layers.1.self_attn.v_proj", "model.layers.0.mlp.up_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "rank_pattern": {"q_proj": 2}},
        {"target_modules": "auto", "use_dora": True},
        {"rank_pattern": {r"layers\.1\..*": 2}, "exclude_modules": ["lm_head", "k_proj"]},
        {"modules_to_save": ["lm_head", "norm"], "init_lora_weights": "gaussian", "bias": "all"},
    ],
    ids=str,
)
def test_what_is_in_it_is_taken(structure: Path, lora: dict[str, Any]) -> None:
    check(structure, **lora)


@pytest.mark.parametrize("name", [*TEXT, *MIXTURES, *VISION, *PADDED])
def test_every_familys_structure_can_be_looked_at(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make: Callable[[], Any] = {**TEXT, **MIXTURES, **VISION, **PADDED}[name]
    make().config.save_pretrained(tmp_path)
    check(tmp_path)
    ours = [record for record in caplog.records if record.name == resuming.__name__]
    assert not ours, "and not left to the learner"
    with pytest.raises(ConfigError, match="nothing in the model is called no_such_layer"):
        check(tmp_path, target_modules=["no_such_layer"])


def test_a_structure_that_cannot_be_made_is_left_to_the_learner(
    structure: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors\nand more")

    monkeypatch.setattr("slipstream.learner.model.loading.kind_of", fails)
    check(structure, target_modules=["no_such_layer"])
    assert "(RuntimeError: Tensor.item() cannot be called on meta tensors)" in caplog.text
    assert "is seen when the learner has loaded them" in caplog.text


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
