"""Checkpoints of an adapter: what peft, transformers and a resumed run make of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.deploy.checks import preflight
from slipstream.learner import start
from slipstream.learner.checkpoints import checkpoint
from slipstream.learner.checkpoints.checkpoint import CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.feed.packing import pack
from slipstream.learner.model.reference import AdapterOff
from slipstream.learner.run import build_trainer
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import ConfigError, ModelSection, RunConfig
from slipstream.protocol.messages import RunPosition
from tests.kit.learner import sample, step_rollouts

peft = pytest.importorskip("peft", reason="needs slipstream-rl[lora]")


def config_of(model_path: Path, lora: dict[str, Any] | None = None, **learner: Any) -> RunConfig:
    return RunConfig(
        model={"path": str(model_path)},
        task={"path": "task.py:task"},
        lora={"r": 4} if lora is None else lora,
        learner={"learning_rate": 1e-2, "advantage": "rloo", "warmup_steps": 3, **learner},
        vllm={"max_model_len": 64},
        rollout={"max_turn_tokens": 32},
    )


def train(trainer: PolicyTrainer, steps: range) -> None:
    for step in steps:
        samples = [sample(12, 3, 10 * step + i, rollout=i) for i in range(4)]
        trainer.step(pack(samples, 32), step_rollouts(samples))


def saved(trainer: PolicyTrainer, model_path: Path, run_dir: Path, step: int = 2) -> checkpoint.Checkpoint:
    sources = Sources(ModelSection(path=str(model_path)))
    return checkpoint.save(run_dir, CheckpointInfo(step, step), trainer, sources, keep=1)


@pytest.mark.parametrize(
    "lora",
    [{"r": 4}, {"r": 4, "use_dora": True}, {"r": 2, "modules_to_save": ["lm_head"]}, {"r": 4, "bias": "all"}],
    ids=str,
)
def test_two_steps_resumed_for_two_equal_four_to_the_bit(
    model_path: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    kl = {} if "bias" in lora else {"kl_coef": 0.1}
    config = config_of(model_path, lora, **kl)
    whole, half = build_trainer(config, None), build_trainer(config, None)
    train(whole, range(4))
    train(half, range(2))
    found = saved(half, model_path, tmp_path)
    resumed = build_trainer(config, found)
    train(resumed, range(2, 4))
    for (name, one), (_, other) in zip(whole.policy.named_parameters(), resumed.policy.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert isinstance(whole.reference, AdapterOff) is bool(kl)


def test_a_checkpoint_is_opened_by_transformers_and_by_peft(model_path: Path, tmp_path: Path) -> None:
    """`model/` is an ordinary model with the adapter in it, `adapter/` goes onto the base: both say the same."""
    trainer = build_trainer(config_of(model_path), None)
    train(trainer, range(2))
    found = saved(trainer, model_path, tmp_path)
    assert {path.name for path in found.adapter_path.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    facts = json.loads((found.adapter_path / "adapter_config.json").read_text())
    assert (facts["r"], facts["task_type"], facts["base_model_name_or_path"]) == (4, "CAUSAL_LM", str(model_path))
    assert not list(found.model_path.glob("adapter*"))
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(found.model_path)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model_path)
        before = base(ids).logits
        beside = peft.PeftModel.from_pretrained(base, found.adapter_path)(ids).logits
    torch.testing.assert_close(merged, beside, atol=1e-4, rtol=1e-4)
    assert (merged - before).abs().max() > 0.1


def test_the_adapter_by_itself_has_the_names_of_its_file(model_path: Path, tmp_path: Path) -> None:
    """A transport that publishes the adapter alone sends these tensors."""
    from safetensors.torch import load_file

    trainer = build_trainer(config_of(model_path), None)
    train(trainer, range(1))
    adapter = trainer.policy.adapter
    assert adapter is not None
    found = saved(trainer, model_path, tmp_path)
    held = load_file(found.adapter_path / "adapter_model.safetensors")
    alone = adapter.tensors()
    assert held.keys() == alone.keys()
    assert all(torch.equal(held[name], alone[name]) for name in held)
    assert sum(tensor.numel() for tensor in alone.values()) == adapter.trained
    facts = json.loads((found.adapter_path / "adapter_config.json").read_text())
    ours = json.loads(json.dumps(adapter.config()))
    assert {name: ours[name] for name in ("r", "lora_alpha", "bias")} == {"r": 4, "lora_alpha": 32, "bias": "none"}
    assert sorted(ours["target_modules"]) == sorted(facts["target_modules"])


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ({"r": 4}, {"r": 8}, r"lora.r = 8 \(was 4\).*begin a new run with --model.path .*model"),
        ({"r": 4}, {"r": 4, "lora_alpha": 8}, r"lora.lora_alpha = 8 \(was 32\)"),
        ({"r": 4}, {"r": 4, "target_modules": ["q_proj"]}, r"lora.target_modules = \{'q_proj'\} \(was"),
        ({"r": 4}, {"r": 0}, r"step-000002 was made with an adapter, and lora.r = 0.*--model.path"),
        ({"r": 0}, {"r": 4}, r"step-000002 was made without an adapter, and lora.r is above 0"),
    ],
    ids=str,
)
def test_an_adapter_of_another_kind_is_not_resumed(
    model_path: Path, tmp_path: Path, before: dict[str, Any], now: dict[str, Any], says: str
) -> None:
    trainer = build_trainer(config_of(model_path, before), None)
    train(trainer, range(2))
    found = saved(trainer, model_path, tmp_path)
    with pytest.raises(ConfigError, match=says):
        build_trainer(config_of(model_path, now), found)


def in_a_run(config: RunConfig, home: Path) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": home})})


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ({"r": 4}, {"r": 8}, r"lora.r = 8 \(was 4\)"),
        ({"r": 4}, {"r": 0}, r"was made with an adapter, and lora.r = 0"),
        ({"r": 0}, {"r": 4}, r"was made without an adapter, and lora.r is above 0"),
        ({"r": 4, "target_modules": ["q_proj", "k_proj"]}, {"r": 4, "target_modules": ["k_proj", "q_proj"]}, None),
        ({"r": 4}, {"r": 4, "init_lora_weights": "gaussian"}, None),
    ],
    ids=str,
)
def test_that_it_is_another_is_known_before_anything_starts(
    model_path: Path, tmp_path: Path, before: dict[str, Any], now: dict[str, Any], says: str | None
) -> None:
    """By the model's structure and the checkpoint's files: no weight is loaded."""
    config = in_a_run(config_of(model_path, now), tmp_path)
    saved(build_trainer(config_of(model_path, before), None), model_path, config.run_dir)
    preflight.check_adapter(config, resume=False)
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        preflight.check_adapter(config, resume=True)


def test_a_resume_never_says_that_another_adapter_is_used_from_here_on(model_path: Path, tmp_path: Path) -> None:
    """It continues as it was made, or not at all."""
    before, now = config_of(model_path), config_of(model_path, {"r": 8}, learning_rate=1e-3)
    made = checkpoint.Checkpoint(tmp_path, CheckpointInfo(2, 2, start.settings(before)))
    said = "\n".join(start.introduction(now, made, RunPosition(2, 2, 4, 1, None, None, False)))
    assert "learner.learning_rate = 0.001 (was 0.01)" in said
    assert "lora." not in said


def test_an_adapter_of_another_model_is_not_resumed(model_path: Path, tmp_path: Path) -> None:
    from tests.kit.model import tiny_model

    trainer = build_trainer(config_of(model_path), None)
    found = saved(trainer, model_path, tmp_path / "run")
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "other")
    with pytest.raises((ConfigError, RuntimeError), match=r"adapter|size mismatch"):
        build_trainer(config_of(tmp_path / "other"), found)


def test_a_damaged_adapter_is_told(model_path: Path, tmp_path: Path) -> None:
    trainer = build_trainer(config_of(model_path), None)
    found = saved(trainer, model_path, tmp_path)
    (found.adapter_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="holds no adapter that can be loaded"):
        build_trainer(config_of(model_path), found)
