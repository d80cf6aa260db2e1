"""What `slipstream doctor run.toml` says of the run's model: found from its config and tokenizer, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from slipstream.deploy.checks.model_facts import facts
from slipstream.deploy.commands import setup
from slipstream.protocol.config import load
from slipstream.rollout_worker.vision.processor import FAMILIES


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
    assert "without tools" in found["model, chat"]
    assert "it shows a developer's message as the system's" in found["model, chat"]
    assert found["model, vLLM"].startswith("its config.json names no architectures")
    assert found["model, learner"] == "trains it, learner.layout trie"
    adapted = told(run_file, "--lora.r", "8", "--lora.target_modules", '["q_proj","v_proj"]')
    assert adapted["model, learner"] == "trains it, learner.layout trie; adapters on q_proj, v_proj"


def test_the_model_of_an_example_that_runs_on_a_cpu_is_known_to_be_served(run_file: Path) -> None:
    found = of_config(run_file, tf.LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=2))
    assert found["model, vLLM"] == "knows LlamaForCausalLM; its CPU build served models of it"


def test_a_large_hybrid_is_judged_without_its_weights(run_file: Path) -> None:
    config = tf.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"])
    found = of_config(run_file, config)
    assert found["model, vLLM"] == (
        "no: model.path = " + str(run_file.parent / "other") + ": vLLM computes its linear attention on a CPU in "
        'bfloat16, not float32: set model.dtype = "bfloat16"'
    )
    right = told(run_file, "--model.path", str(run_file.parent / "other"), "--model.dtype", "bfloat16")
    known, served = right["model, vLLM"].split("; ")
    assert (known, served) == ("knows Qwen3NextForCausalLM", "its CPU build served models of it")
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


SEEING = {
    "Qwen2VL": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "Qwen2_5_VL": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    **dict.fromkeys(("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")),
}


@pytest.mark.parametrize("name", SEEING)
def test_every_family_that_is_named_as_seeing_trains_with_images(run_file: Path, name: str) -> None:
    """By the learner's own check of images, on a small model of it."""
    config = getattr(tf, f"{name}Config")(architectures=[f"{name}ForConditionalGeneration"])
    assert config.model_type in FAMILIES
    if SEEING[name] is not None:
        config.text_config.rope_parameters = SEEING[name]
    found = of_config(run_file, config, "--images.enabled", "true")
    assert found["model, learner"] == "trains it, learner.layout padded, since images.enabled = true"
    assert found["model, images"].startswith("no: images.enabled = true: model.path = ")
    assert "no image processor" in found["model, images"]


def test_the_models_own_code_is_tried_where_it_is_trusted(run_file: Path) -> None:
    """Its own code stands next to its config, and reaches the small model."""
    other = run_file.parent / "other"
    other.mkdir()
    for file in (run_file.parent / "model").iterdir():
        (other / file.name).symlink_to(file.resolve())
    (other / "config.json").unlink()
    (other / "of_own.py").write_text(OF_OWN)
    own = {"AutoConfig": "of_own.OwnConfig", "AutoModelForCausalLM": "of_own.OwnForCausalLM"}
    (other / "config.json").write_text(json.dumps({"model_type": "of_own", "auto_map": own, "hidden_size": 4096}))
    path = ["--model.path", str(other)]
    assert "set model.trust_remote_code = true" in told(run_file, *path)["model"]
    found = told(run_file, *path, "--model.trust_remote_code", "true")
    assert found["model"].startswith("OwnForCausalLM, ")
    assert found["model, learner"] == "trains it, learner.layout trie"


OF_OWN = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "of_own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_what_a_run_asks_of_its_model_beside_text(run_file: Path) -> None:
    config = tf.Qwen3Config(architectures=["Qwen3ForCausalLM"])
    found = of_config(run_file, config, "--images.enabled", "true", "--learner.router_replay", "true")
    assert "a qwen3 without a part that sees" in found["model, images"]
    assert found["model, experts"].startswith("no: learner.router_replay = true: ")
    assert found["model, learner"].startswith("no: learner.router_replay = true: Qwen3ForCausalLM is not a mixture")
    assert "model, images" not in told(run_file)
    assert " rows, of which some were tried" in told(run_file)["task"]
    (run_file.parent / "task.py").write_text("import nothing_of_that_name")
    assert told(run_file)["task"].startswith("no: task.path = ")
    assert "nothing_of_that_name" in told(run_file)["task"]


def test_what_a_model_says_of_its_arithmetic_stays_in_the_small_one(run_file: Path) -> None:
    from slipstream.deploy.checks.small_model import small

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
    weights = run_file.parent / "model" / "model.safetensors"
    weights.write_bytes(b"")
    assert "model.safetensors has 0 bytes, so it is cut off" in told(run_file)["model, weights"]
    save_file({"a": torch.zeros(1)}, weights)
    assert "model, weights" not in told(run_file)


def test_a_config_that_transformers_does_not_know_is_one_line(run_file: Path) -> None:
    other = run_file.parent / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    found = told(run_file, "--model.path", str(other))
    assert found.keys() == {"model"}
    assert "of_tomorrow" in found["model"]
    assert "\n" not in found["model"]
