"""What `slipstream doctor run.toml` says of the run's model: found from its config and tokenizer, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from deploy.checks.model_facts import facts
from deploy.commands import setup
from protocol.config import load


def told(run_file: Path, *overrides: str) -> dict[str, str]:
    return dict(facts(load(run_file, list(overrides))))


def of_config(run_file: Path, config: Any, *overrides: str) -> dict[str, str]:
    """What is told of a model of which only a config is there, besides the tokenizer."""
    folder = run_file.parent / "model"
    files = [path.resolve() for path in folder.iterdir() if path.name != "config.json"]
    other = run_file.parent / "other"
    other.mkdir()
    for file in files:
        (other / file.name).symlink_to(file)
    config.save_pretrained(other)
    return told(run_file, "--model.path", str(other), *overrides)


def test_a_model_that_all_parts_take(run_file: Path) -> None:
    found = told(run_file)
    assert found["model"].startswith("Qwen3ForCausalLM, ")
    assert found["model, chat"].endswith("with and without tools") or "without tools: " in found["model, chat"]
    assert found["model, vLLM"].startswith("its config.json names no architectures")
    assert found["model, learner"] == "trains it, learner.layout trie"
    adapted = told(run_file, "--lora.r", "8", "--lora.target_modules", '["q_proj","v_proj"]')
    assert adapted["model, learner"] == "trains it, learner.layout trie; adapters on q_proj, v_proj"


def test_a_large_hybrid_is_judged_without_its_weights(run_file: Path) -> None:
    config = tf.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"])
    found = of_config(run_file, config)
    assert found["model, vLLM"].startswith("knows Qwen3NextForCausalLM")
    assert "billion parameters, context 32,768" in found["model"]
    assert found["model, learner"].startswith("trains it, learner.layout padded, since Qwen3NextForCausalLM scores a ")
    forced = told(run_file, "--model.path", str(run_file.parent / "other"), "--learner.layout", "trie")
    assert forced["model, learner"].startswith("no: model.path: Qwen3NextForCausalLM scores a ")


def test_a_model_that_sees_is_made_small_with_its_positions(run_file: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = tf.Qwen2_5_VLConfig(
        text_config={"rope_parameters": rope}, architectures=["Qwen2_5_VLForConditionalGeneration"]
    )
    assert of_config(run_file, config)["model, learner"] == "trains it, learner.layout trie"


def test_what_a_model_says_of_its_arithmetic_stays_in_the_small_one(run_file: Path) -> None:
    from deploy.checks.small_model import small

    large = tf.Gemma2Config(final_logit_softcapping=11.0, hidden_activation="silu", rope_theta=7.0)
    found = small(large)
    assert (found.final_logit_softcapping, found.hidden_activation) == (11.0, "silu")
    assert found.rope_parameters == large.rope_parameters
    assert (found.hidden_size, len(found.layer_types)) == (32, 2)


def test_what_a_part_does_not_take_is_said_in_its_line(run_file: Path) -> None:
    found = of_config(run_file, tf.BltConfig(architectures=["BltForCausalLM"]))
    assert found["model, vLLM"].startswith("has no code of its own for BltForCausalLM")
    assert found["model, learner"].startswith("no: model.path = ")


def test_a_folder_without_weights_is_broken(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(run_file)
    assert found["model, weights"].startswith("no: model.path = ")
    assert "holds no *.safetensors" in found["model, weights"]
    assert setup.examine(load(run_file)) == 1
    assert "broken: model, weights: model.path = " in " ".join(capsys.readouterr().out.split())
    (run_file.parent / "model" / "model.safetensors").write_bytes(b"")
    assert "model, weights" not in told(run_file)


def test_a_config_that_transformers_does_not_know_is_one_line(run_file: Path) -> None:
    other = run_file.parent / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    found = told(run_file, "--model.path", str(other))
    assert found.keys() == {"model"}
    assert "of_tomorrow" in found["model"]
    assert "\n" not in found["model"]
