"""The settings of adapter, quantised base, optimiser and schedule: what does nothing, or cannot be, is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.protocol.config import ConfigError, RunConfig, load, resolve
from slipstream.protocol.config.adapter_checks import (
    find_adapter_warnings,
    is_adapter_published_alone,
    merged_adapter_message,
)


def made(**sections: dict[str, Any]) -> RunConfig:
    given = {"model": {"path": "org/model"}, "task": {"path": "task.py:task"}}
    merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}
    return resolve(None, {(name, key): of for name, table in merged.items() for key, of in table.items()}, "test")


LORA = {"r": 16}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"lora": {"lora_alpha": 8}}, r"lora.lora_alpha = 8 does nothing without lora.r: set lora.r, to 16"),
        ({"lora": {"target_modules": ["q_proj"]}}, r'lora.target_modules = \["q_proj"\] does nothing without lora.r'),
        (
            {"lora": {**LORA, "lora_dropout": 0.1}},
            r"lora.lora_dropout = 0.1: must be at most 0.*would not be the sampler's",
        ),
        ({"lora": {**LORA, "init_lora_weights": "pissa"}}, r'init_lora_weights.*must be true or "gaussian"'),
        ({"lora": {**LORA, "init_lora_weights": False}}, r"init_lora_weights.*start away from it"),
        ({"lora": {**LORA, "target_modules": []}}, r"target_modules.*must name a layer"),
        ({"lora": {**LORA, "bias": "some"}}, r"lora.bias = \"some\": must be 'none', 'all' or 'lora_only'"),
        (
            {"lora": {**LORA, "target_modules": ".*q_proj", "layers_to_transform": [1]}},
            r"layers_to_transform = \[1\] with lora.target_modules = \".*q_proj\".*write the numbers of the",
        ),
        ({"lora": {**LORA, "target_modules": "(q"}}, r"target_modules = \"\(q\": \(q is not a regular expression"),
        (
            {"lora": {**LORA, "rank_pattern": {"(q": 4}}},
            r"rank_pattern.*\(q is not a regular expression.*such as q_proj",
        ),
        (  # peft puts an expression of its own before the key
            {"lora": {**LORA, "alpha_pattern": {"(?i)q": 4}}},
            r"alpha_pattern.*\(\?i\)q is not a regular expression.*flags not at the start",
        ),
        (
            {"lora": LORA, "learner": {"weights_dtype": "model"}},
            "weights_dtype = model with lora.r = 16.*leave learner",
        ),
        (
            {"lora": LORA, "learner": {"kl_coef": 0.1, "reference_sync_steps": 5}},
            "reference_sync_steps = 5 with lora.r",
        ),
        ({"lora": {**LORA, "bias": "all"}, "learner": {"kl_coef": 0.1}}, "kl_coef = 0.1 with lora.bias = all.*none"),
        ({"model": {"load_in_4bit": True}}, "load_in_4bit = true without an adapter.*set lora.r"),
        ({"lora": LORA, "model": {"load_in_4bit": True, "load_in_8bit": True}}, "are both true: leave one of them out"),
        ({"lora": LORA, "model": {"bnb_4bit_quant_type": "fp4"}}, "bnb_4bit_quant_type = .fp4. does nothing without"),
        ({"learner": {"lr_scheduler_type": "linaer"}}, "lr_scheduler_type = .linaer.: must be"),
        (
            {"learner": {"lr_scheduler_kwargs": {"power": 2}}},
            "lr_scheduler_type = constant_with_warmup takes none",
        ),
        ({"learner": {"lr_scheduler_type": "constant", "warmup_steps": 3}}, "warmup_steps = 3 does nothing with"),
        (
            {"learner": {"shard_weights": True, "optim": "adafactor"}},
            "optim = adafactor with learner.shard_weights = true.*choose one of adagrad, adamw_torch",
        ),
        ({"learner": {"shard_weights": True, "optim": "paged_adamw_8bit"}}, "or leave learner.shard_weights out"),
        ({"learner": {"optim_args": {"lr": 0.1}}}, "lr has its own setting; set learner.learning_rate"),
        ({"learner": {"optim_args": {"betas": [0.9, 0.99]}}}, "betas has its own setting; set learner.betas"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_remedy(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"lora": LORA, "learner": {"kl_coef": 0.1}},
        {"lora": {**LORA, "target_modules": "auto", "rank_pattern": {"q_proj": 4}}, "model": {"load_in_8bit": True}},
        {"lora": {**LORA, "layers_to_transform": [1]}},
        {"learner": {"shard_weights": True, "optim": "muon"}},
        {"learner": {"optim": "ademamix", "optim_args": {"betas": [0.9, 0.999, 0.9999], "alpha": 5.0}}},
        {"learner": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}},
    ],
    ids=str,
)
def test_what_can_be_is_taken(sections: dict[str, Any]) -> None:
    made(**sections)


def test_an_adapter_that_is_published_alone_takes_no_delta() -> None:
    with pytest.raises(ValueError, match=r"an adapter is small and always sent whole.*leave weight_sync\.delta out"):
        made(lora=LORA, weight_sync={"adapter_only": True, "delta": True})
    made(lora=LORA, weight_sync={"adapter_only": False, "delta": True})


@pytest.mark.parametrize(("rate", "said"), [(1e-6, 1), (1e-4, 0)])
def test_a_learning_rate_that_is_too_low_for_an_adapter_is_a_warning(rate: float, said: int) -> None:
    config = made(lora=LORA, learner={"learning_rate": rate})
    assert len(find_adapter_warnings(config.learner, config.lora)) == said
    plain = made(learner={"learning_rate": rate})
    assert find_adapter_warnings(plain.learner, plain.lora) == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("adamw", '"adamw_torch_fused" or "adamw_torch"'),
        ("AdamW", '"adamw_torch_fused" or "adamw_torch"'),
        ("adamw_torc", '"adamw_torch"'),
        ("lion", '"lion_8bit"'),
    ],
)
def test_a_misspelt_optimiser_is_told_with_the_one_that_was_meant(tmp_path: Path, given: str, meant: str) -> None:
    """It does not advise one that needs a GPU and bitsandbytes, if the plain one is as near."""
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "org/model"\n[task]\npath = "task.py:task"\n', encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load(path, ["--learner.optim", given])
    assert f"; did you mean {meant}?" in str(error.value)


ALONE = {"adapter_only": True}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({}, r"adapter_only = true without an adapter: set lora.r, to 16"),
        ({"lora": {**LORA, "use_dora": True}}, r"adapter_only = true with lora.use_dora = true: vLLM serves no such"),
        ({"lora": {**LORA, "bias": "all"}}, r"adapter_only = true with lora.bias = all"),
        (
            {"lora": {**LORA, "modules_to_save": ["lm_head"]}},
            r'lora.modules_to_save = \["lm_head"\].*adapter_only = fal',
        ),
        ({"lora": {"r": 513}}, r"a rank of 513, above 512"),
        ({"lora": {**LORA, "rank_pattern": {"q_proj": 600}}}, r"a rank of 600, above 512"),
        ({"lora": LORA, "model": {"load_in_4bit": True, "dtype": "bfloat16"}}, r"model.load_in_4bit = true: vLLM"),
    ],
)
def test_an_adapter_that_vllm_cannot_serve_is_refused_where_it_is_to_be_published_alone(
    sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        made(weight_sync=ALONE, **sections)
    for merged in (False, "auto"):
        made(weight_sync={"adapter_only": merged}, **sections)


@pytest.mark.parametrize(
    ("adapter_only", "lora", "on_gpu", "alone"),
    [
        ("auto", LORA, True, True),
        ("auto", LORA, False, False),  # sampling under an adapter is slower there
        ("auto", {}, True, False),
        ("auto", {**LORA, "use_dora": True}, True, False),
        (True, LORA, False, True),
        (False, LORA, True, False),
    ],
)
def test_auto_publishes_the_adapter_alone_on_gpus_where_vllm_can_serve_it(
    adapter_only: Any, lora: dict[str, Any], on_gpu: bool, alone: bool
) -> None:
    config = made(weight_sync={"adapter_only": adapter_only}, lora=lora)
    assert is_adapter_published_alone(config.weight_sync.adapter_only, config.model, config.lora, on_gpu) is alone
    said = merged_adapter_message(config.weight_sync.adapter_only, config.model, config.lora, on_gpu)
    assert ("use_dora" in said) is bool(lora.get("use_dora"))
