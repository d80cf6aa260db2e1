"""The model before a start: the context that it allows, as vLLM counts it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from slipstream.deploy.checks import model_check, preflight
from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, load
from tests.kit import config


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        ({"model_type": "qwen3", "max_position_embeddings": 1024}, 1024),
        ({"model_type": "qwen3", "max_position_embeddings": 1024, "model_max_length": 4096}, 4096),
        (
            {
                "model_type": "qwen3",
                "max_position_embeddings": 1024,
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            },
            4096,
        ),
        (
            {
                "model_type": "qwen3",
                "max_position_embeddings": 1024,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 256,
                },
            },
            1024,
        ),
        ({"model_type": "gpt2", "n_positions": 777}, 777),
        ({"model_type": "bloom"}, None),
    ],
    ids=["plain", "its own longer one", "linear scaling", "yarn", "gpt2", "says nothing"],
)
def test_the_longest_context(model: dict[str, Any], longest: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    assert model_check.longest_context(AutoConfig.from_pretrained(tmp_path)) == longest


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the hub to load the files.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(ConfigError, match=r"couldn't connect .*; give the path of a model folder, or fetch it first"):
        model_check.check_model(config(model={"path": "org/model"}))


@pytest.mark.parametrize(
    ("shards", "cut", "told"),
    [
        (["model.safetensors"], 0, None),
        (["model.safetensors"], 8, r"model.safetensors has .* bytes, so it is cut off .*; copy it again"),
        (["model.safetensors"], 10_000, r"model.safetensors has 0 bytes, so it is cut off"),
        (["model-1.safetensors", "model-2.safetensors"], 0, "its weights model-2.safetensors are missing"),
    ],
    ids=["whole", "cut off", "empty", "a shard is missing"],
)
def test_weights_that_were_copied_in_part(shards: list[str], cut: int, told: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    save_file({"a": torch.zeros(64)}, tmp_path / shards[0])
    whole = (tmp_path / shards[0]).read_bytes()
    (tmp_path / shards[0]).write_bytes(whole[: max(0, len(whole) - cut)])
    if len(shards) > 1:
        names = {f"weight{number}": name for number, name in enumerate(shards)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        model_check.check_model(config(model={"path": str(tmp_path)}))


def test_a_context_above_the_models_is_refused_unless_vllm_was_told_to_allow_it(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 32768
    overrides = ["--vllm.max_model_len", str(longest + 1), "--learner.token_budget", "99999"]
    with pytest.raises(
        ConfigError,
        match=rf"vllm\.max_model_len = {longest + 1} is more than the model's {longest}: .* at most {longest}",
    ):
        model_check.check_model(load(run_file, overrides))
    model_check.check_model(load(run_file, ["--vllm.max_model_len", str(longest), "--learner.token_budget", "99999"]))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    model_check.check_model(load(run_file, overrides))


REMOTE = "from transformers import PretrainedConfig\n\n\nclass Odd(PretrainedConfig):\n    model_type = 'odd'\n"


def test_a_model_with_code_of_its_own_is_run_only_where_it_is_trusted(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "odd.py").write_text(REMOTE, encoding="utf-8")
    facts = {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    settings = ["--model.path", str(folder)]
    with pytest.raises(ConfigError, match=r"if you trust it set model.trust_remote_code = true$"):
        model_check.check_model(load(run_file, settings))
    with pytest.raises(ConfigError, match="is more than the model's 512"):
        model_check.check_model(load(run_file, [*settings, "--model.trust_remote_code", "true"]))


def test_a_revision_is_looked_up_and_named_where_there_is_none(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def from_pretrained(path: str, **options: Any) -> Any:
        asked.append({"path": path, **options})
        raise OSError("abc is not a valid git identifier")

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(ConfigError, match=r"org/name, model.revision = abc: .*or commit that it has"):
        model_check.check_model(load(run_file, ["--model.path", "org/name", "--model.revision", "abc"]))
    assert asked == [{"path": "org/name", "revision": "abc", "trust_remote_code": False}]


@pytest.mark.parametrize(("exists", "says"), [(False, "there is no such folder"), (True, "the folder holds no config")])
def test_a_model_folder_that_is_not_there(run_file: Path, tmp_path: Path, exists: bool, says: str) -> None:
    config = load(run_file)
    path = tmp_path / "gone"
    if exists:
        path.mkdir()
    gone = config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
    with pytest.raises(ConfigError, match=f"model.path = {path}: {says}"):
        model_check.check_model(gone)


def folder_of(path: Path, **changed: Any) -> Path:
    """A model's config alone."""
    shape = {"model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(shape | changed), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_hidden_layers": 3}, r"num_hidden_layers = 3 \(was 2\)"),
        ({"hidden_size": 256, "vocab_size": 99}, r"hidden_size = 256 \(was 128\), vocab_size = 99 \(was 151936\)"),
        ({"model_type": "llama"}, r"model_type = llama \(was qwen3\)"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings = True \(was False\)"),
        ({"max_position_embeddings": 77, "torch_dtype": "bfloat16"}, None),
    ],
    ids=str,
)
def test_a_model_of_another_shape_is_not_resumed(
    changed: dict[str, Any], says: str | None, run_file: Path, tmp_path: Path
) -> None:
    """vLLM would start with it, and could not take the checkpoint's weights."""
    config = load(run_file, ["--run.dir", str(tmp_path / "runs"), "--model.path", str(tmp_path / "new")])
    folder_of(tmp_path / "new", **changed)
    saved = checkpoints.folder(config.run_dir) / checkpoints.name_of(4)
    folder_of(saved / checkpoints.MODEL)
    (saved / checkpoints.STATE).write_text("{}", encoding="utf-8")
    model_check.check_resumed(config, resume=False)
    refused = rf"model\.path = .*new is another model than .*step-000004 was made with: {says}.*; continue with"
    with pytest.raises(ConfigError, match=refused) if says else nullcontext():
        model_check.check_resumed(config, resume=True)


def test_a_preflight_asks_whether_the_checkpoint_is_of_the_same_shape(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(model_check, "check_resumed", lambda config, resume: asked.append(resume))
    preflight.check_run(load(run_file, ["--queue.port", "8391", "--vllm.port", "8392"]), resume=False)
    assert asked == [False]
