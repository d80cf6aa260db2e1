"""`slipstream.trl`: scripts as TRL's documentation writes them run by changing the import alone."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from slipstream import script as script_module
from slipstream.deploy.run import run_directory
from slipstream.learner import callbacks
from slipstream.protocol import checkpoints
from slipstream.protocol.checkpoints import Best
from slipstream.protocol.config import ConfigError, RunConfig, TaskSection, resolve
from slipstream.rollout_worker.task.task import Task, load_task
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.script import overrides
from slipstream.trl import AsyncGRPOConfig, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, TrainOutput, notebook
from slipstream.trl.configs import _Config
from slipstream.trl.models import save_object
from slipstream.trl.state import read_state
from slipstream.trl.translate import PROCESSES, check_fields, translate
from tests import kit
from tests.kit.fake_vllm.policies import scripted
from tests.kit.fake_vllm.tokenizer import build_tokenizer
from tests.kit.model import save_tiny_model, tiny_model
from tests.kit.worker import TOKENIZER, fake, roll
from tests.slipstream.conftest import Script
from tests.slipstream.test_script import PATCHED, run, sections, stand_in

SCRIPTS = Path(__file__).parent / "trl_scripts"
NAMES = ["functions", "async_tools"]
ROWS = [{"prompt": "Multiply 2 by 3."}]


def accuracy(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: Path) -> list[tuple[RunConfig, bool]]:
    """Note what a script would have run; give it three steps' losses and a checkpoint."""
    runs: list[tuple[RunConfig, bool]] = []

    def supervise(config: RunConfig, resume: bool) -> None:
        runs.append((config, resume))
        model = config.run_dir / "checkpoints" / "step-000005" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model.parent / "state.json").write_text("{}")
        (config.run_dir / "summary.json").write_text('{"steps": 5, "wall_s": 9.0, "reward_last10": 0.5}')
        lines = "".join(json.dumps({"step": step, "loss": step}) + "\n" for step in (1, 2, 3))
        (config.run_dir / "metrics.jsonl").write_text(lines)

    monkeypatch.setattr(script_module, "supervise", supervise)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", str(model_folder))
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "out" / "mine"))
    return runs


def save_checkpoints(run_dir: Path, *steps: int) -> None:
    for step in steps:
        model = run_dir / "checkpoints" / f"step-{step:06d}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(str(step))
        (model.parent / "state.json").write_text("{}")


@pytest.mark.parametrize(("wants_best", "saved"), [(False, "1000000"), (True, "999998")])
def test_save_model_takes_the_newest_by_number_or_the_best(tmp_path: Path, wants_best: bool, saved: str) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    args = GRPOConfig(str(tmp_path / "mine"), **(evaluated if wants_best else {}))
    trainer = GRPOTrainer("org/model", accuracy, args, ROWS, eval_dataset=ROWS)
    save_checkpoints(trainer.run_dir, 1_000_000, 999_999, 999_998)
    checkpoints.write_best(trainer.run_dir, Best(999_998, 0.5))
    trainer.save_model(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == saved


def test_what_save_model_copies_of_an_adapter_is_loaded_as_trl_s(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = build_tokenizer()
    base = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=8, **shape))
    base.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(str(tmp_path / "base"), accuracy, GRPOConfig(str(tmp_path / "mine")), ROWS, peft_config=lora)
    save_checkpoints(trainer.run_dir, 3)
    checkpoint = trainer.run_dir / "checkpoints" / "step-000003"
    model = peft.get_peft_model(Qwen3ForCausalLM.from_pretrained(tmp_path / "base"), lora)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    model.save_pretrained(checkpoint / "adapter")
    wanted = model(torch.arange(8)[None]).logits
    merged = model.merge_and_unload()
    merged.save_pretrained(checkpoint / "model")
    tokenizer.save_pretrained(checkpoint / "model")

    trainer.save_model(tmp_path / "out")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    whole = Qwen3ForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    for each in (loaded, whole):
        torch.testing.assert_close(each(torch.arange(8)[None]).logits, wanted, atol=1e-5, rtol=1e-4)
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_loads_the_script_as_its_task_and_trains_nothing(
    name: str, supervised: list[tuple[RunConfig, bool]], tmp_path: Path
) -> None:
    task = load_task(TaskSection(path=f"{SCRIPTS}/{name}.py:trainer"))
    assert isinstance(task, Task)
    assert len(task.dataset) == 512
    assert "multiply" in [schema["function"]["name"] for schema in ToolBox(task.tools).schemas]
    assert supervised == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_i7_the_tool_is_the_one_that_the_tiny_model_was_warmed_up_on(name: str) -> None:
    """By another schema it makes no call, and trains nothing."""
    known = load_task(TaskSection(path=f"{SCRIPTS.parents[2]}/examples/multiply/task.py:task"))
    task = load_task(TaskSection(path=f"{SCRIPTS}/{name}.py:trainer"))
    assert ToolBox(task.tools).schemas[0] == ToolBox(known.tools).schemas[0]


async def test_a_script_with_an_environment_plays_as_trl_documents_it(model_folder: Path) -> None:
    """The import alone is changed: what reset says ends the prompt, methods are tools, get_reward rewards."""
    task = load_task(TaskSection(path=f"{SCRIPTS}/environment.py:trainer"))

    def reply(text: str, index: int) -> str:
        if "<tool_response>" in text:
            return "Done."
        goal = re.findall(r"Reach (\d+)", text)[-1]
        return f'<tool_call>{{"name": "increment", "arguments": {{"step": {int(goal) + index}}}}}</tool_call>'

    roomy = kit.config(kit.WORKER, vllm={"max_model_len": 4000})
    run = await roll(task, fake(scripted(TOKENIZER, reply)), tickets=2, config=roomy)
    assert run.queue.failures == {}
    for rollout in run.rollouts:
        assert rollout.reward_components == {"CounterEnv": 1.0}
        assert rollout.reward == 1.0
        text = TOKENIZER.decode(rollout.segments[0].token_ids)
        assert re.search(r"Use the tool\. Reach \d+\.", text)
        assert text.index("Increment the internal counter.") < text.index("Look at the internal counter.")


TWO_TRAINERS = """
from slipstream.trl import GRPOTrainer
def accuracy(completions, **kwargs):
    return [0.0] * len(completions)
first = GRPOTrainer("org/model", accuracy, None, [{"prompt": "1"}])
print("first", first.train().global_step)
second = GRPOTrainer("org/model", accuracy, None, [{"prompt": "2"}])
try:
    second.train()
except Exception:
    pass
print("result")
raise ValueError("workers do not come here")
"""


@pytest.mark.parametrize(("name", "said"), [("first", ""), ("second", "first 0\n")])
def test_i7_the_import_for_a_task_ends_at_its_own_train(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code after it would show a result of no steps before the run has begun."""
    file = tmp_path / "two.py"
    file.write_text(TWO_TRAINERS)
    task = load_task(TaskSection(path=f"{file}:{name}"))
    assert list(task.dataset) == [{"prompt": "1" if name == "first" else "2"}]
    assert capsys.readouterr().out == said


def test_functions_run_with_the_settings_of_its_config(
    supervised: list[tuple[RunConfig, bool]], capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: Path
) -> None:
    runpy.run_path(f"{SCRIPTS}/functions.py", run_name="__main__")
    ((config, resume),) = supervised
    assert not resume
    assert config.run_dir == tmp_path / "out" / "mine"
    assert config.model.path == str(model_folder)
    assert config.task.path == f"{SCRIPTS}/functions.py:trainer"
    learner, rollout = config.learner, config.rollout
    assert (learner.steps, learner.epochs, learner.groups_per_step, rollout.group_size) == (5, None, 4, 8)
    assert (learner.learning_rate, learner.warmup_steps, learner.betas) == (4e-4, 2, (0.9, 0.999))
    assert (learner.clip_low, learner.clip_high, learner.advantage) == (0.2, 0.2, "grpo")
    assert (rollout.max_episode_tokens, rollout.max_turns, learner.show_rollout_every) == (160, 0, 1)
    assert config.run.seed == 42
    out, err = capsys.readouterr()
    assert "trained 5 steps, loss 2.0" in out
    assert "generation and training run at once" in err


def test_async_tools_run_with_the_settings_of_its_config(supervised: list[tuple[RunConfig, bool]]) -> None:
    runpy.run_path(f"{SCRIPTS}/async_tools.py", run_name="__main__")
    ((config, _),) = supervised
    assert (config.queue.max_staleness, config.weight_sync.every, config.rollout.max_turns) == (2, 1, 4)
    assert (config.learner.groups_per_step, config.vllm.servers) == (4, [])
    assert (config.run_dir / "config.json").is_file()  # save_model()


@pytest.mark.parametrize("name", NAMES)
def test_the_script_is_one_for_trl_but_for_its_import(name: str) -> None:
    """Every argument that it gives is one of TRL 1.16's, as its source says."""
    fields = json.loads((SCRIPTS.parents[1] / "docs" / "trl_1_16_fields.json").read_text(encoding="utf-8"))["fields"]
    arguments = set(dataclass_fields("transformers", "TrainingArguments"))
    takes = {
        "GRPOConfig": {*fields["GRPOConfig"], *arguments},
        "AsyncGRPOConfig": {*fields["AsyncGRPOConfig"], *arguments},
        "GRPOTrainer": parameters_of("trl/trainer/grpo_trainer.py", "GRPOTrainer"),
        "AsyncGRPOTrainer": parameters_of("trl/experimental/async_grpo/async_grpo_trainer.py", "AsyncGRPOTrainer"),
    }
    tree = ast.parse((SCRIPTS / f"{name}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    given = {call.func.id: {word.arg for word in call.keywords} for call in calls if call.func.id in takes}  # type: ignore[attr-defined]
    assert len(given) == 2
    for what, names in given.items():
        assert names <= takes[what]


def parameters_of(file: str, of: str) -> set[str]:
    """The parameters of a class of TRL's, read from its source."""
    trl = pytest.importorskip("trl")
    tree = ast.parse((Path(trl.__file__).parents[1] / file).read_text(encoding="utf-8"))
    (kind,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == of)
    (made,) = (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return {argument.arg for argument in (*made.args.args, *made.args.kwonlyargs)}


def dataclass_fields(module: str, name: str) -> list[str]:
    import dataclasses
    import importlib

    return [field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))]


def sections_of(config: _Config, context: int | None = None) -> dict[str, dict[str, Any]]:
    return translate(config, "org/model", context).sections


@pytest.mark.parametrize(
    ("config", "section", "settings"),
    [
        (GRPOConfig(), "learner", {"groups_per_step": 1, "epochs": 3.0, "learning_rate": 1e-6, "warmup_steps": 0}),
        (GRPOConfig(), "rollout", {"group_size": 8, "max_episode_tokens": 512, "max_turn_tokens": 512}),
        (GRPOConfig(), "run", {"dir": ".", "name": "trainer_output", "seed": 42}),
        (RLOOConfig(beta=0.0), "rollout", {"group_size": 2}),
        (RLOOConfig(beta=0.0), "learner", {"groups_per_step": 4, "algorithm": "rloo"}),
        (AsyncGRPOConfig(), "rollout", {"max_episode_tokens": 2048}),
        (AsyncGRPOConfig(), "queue", {"max_staleness": 4}),
        (AsyncGRPOConfig(queue_maxsize=100, max_inflight_tasks=64), "queue", {"capacity_groups": 13}),
        (AsyncGRPOConfig(queue_maxsize=100, max_inflight_tasks=64), "worker", {"episodes": 64}),
        (GRPOConfig(max_steps=3), "learner", {"steps": 3, "zero_variance": "keep"}),
        (AsyncGRPOConfig(), "learner", {"zero_variance": "keep"}),
        (GRPOConfig(slipstream={"learner": {"zero_variance": "refill"}}), "learner", {"zero_variance": "refill"}),
        (GRPOConfig("a/b/mine"), "run", {"dir": "a/b", "name": "mine"}),
        (GRPOConfig(epsilon=0.1, epsilon_high=0.3), "learner", {"clip_low": 0.1, "clip_high": 0.3}),
        (GRPOConfig(max_steps=100, warmup_steps=0.1), "learner", {"steps": 100, "warmup_steps": 10}),
        (GRPOConfig(top_k=-1, top_p=0.9, min_p=0.1), "rollout", {"top_k": 64, "top_p": 0.9, "min_p": 0.1}),
        (GRPOConfig(top_k=9, top_p=0.9), "rollout", {"top_k": 9, "top_p": 0.9}),
        (GRPOConfig(top_k=-1, top_p=1), "rollout", {"top_k": 0, "top_p": 1}),
        (GRPOConfig(mask_truncated_completions=True), "rollout", {"mask_truncated": True}),
        (GRPOConfig(shuffle_dataset=False), "task", {"order": "as_given"}),
        (GRPOConfig(save_strategy="no"), "learner", {"checkpoint_every": 0, "checkpoint_minutes": 0}),
        (GRPOConfig(save_steps=20, save_total_limit=3), "learner", {"checkpoint_every": 20, "keep_checkpoints": 3}),
        (
            GRPOConfig(save_steps=20, eval_strategy="steps", eval_steps=10, load_best_model_at_end=True),
            "learner",
            {"keep_best": True},
        ),
        (GRPOConfig(metric_for_best_model="eval_reward", greater_is_better=True), "learner", {"zero_variance": "keep"}),
        (GRPOConfig(chat_template_kwargs={"a": False}), "chat", {"chat_template_kwargs": {"a": False}}),
        (GRPOConfig(bf16=True), "model", {"dtype": "bfloat16", "path": "org/model"}),
        (GRPOConfig(model_init_kwargs={"dtype": "float16"}), "model", {"dtype": "float16"}),
        (GRPOConfig(model_init_kwargs={"revision": "a", "attn_implementation": "sdpa"}), "model", {"revision": "a"}),
        (GRPOConfig(vllm_server_port=8001), "vllm", {"servers": ["http://127.0.0.1:8001"]}),
        (GRPOConfig(vllm_gpu_memory_utilization=0.5), "vllm", {"args": ["--gpu-memory-utilization", "0.5"]}),
        (GRPOConfig(max_completion_length=8192), "vllm", {"max_model_len": 16384}),
        (GRPOConfig(max_completion_length=8192), "learner", {"token_budget": 16384}),
        (GRPOConfig(slipstream={"queue": {"max_staleness": 0}}), "queue", {"max_staleness": 0}),
        (GRPOConfig(epsilon=0.1, slipstream={"learner": {"clip_low": 0.3}}), "learner", {"clip_low": 0.3}),
    ],
    ids=str,
)
def test_a_field_becomes_a_setting(config: _Config, section: str, settings: dict[str, Any]) -> None:
    made = sections_of(config)[section]
    assert {key: made.get(key) for key in settings} == settings


OBJECTIVES: list[tuple[_Config, dict[str, Any]]] = [
    (GRPOConfig(), {"algorithm": "dapo", "normaliser": "tokens", "correction": "none", "delta": "none", "kl_coef": 0}),
    (GRPOConfig(), {"clip_low": 0.2, "clip_high": 0.2, "advantage": "grpo", "objective": "ppo_clip"}),
    (RLOOConfig(), {"algorithm": "rloo", "kl_coef": 0.05, "kl_in_reward": True, "normaliser": "rollouts"}),
    (RLOOConfig(), {"objective": "sequence_clip", "clip_high": 0.2, "delta": "none", "reference_sync_steps": 0}),
    (RLOOConfig(beta=0, reward_clip_range=(-1, 1)), {"kl_coef": 0, "reward_clip": (-1, 1)}),
    (RLOOConfig(normalize_advantages=True), {"normalise_advantages": True}),
    (AsyncGRPOConfig(epsilon=0.1), {"algorithm": "async_grpo", "clip_low": 0.1, "clip_high": 0.1, "delta": "none"}),
    (AsyncGRPOConfig(), {"advantage": "async_grpo", "correction": "none", "normaliser": "tokens"}),
    (GRPOConfig(loss_type="grpo"), {"normaliser": "sequences", "objective": "ppo_clip"}),
    (GRPOConfig(loss_type="bnpo"), {"algorithm": "bnpo", "normaliser": "tokens"}),
    (GRPOConfig(loss_type="dr_grpo"), {"advantage": "grpo", "normaliser": "constant"}),
    (GRPOConfig(loss_type="dr_grpo", scale_rewards=False), {"algorithm": "dr_grpo", "advantage": "dr_grpo"}),
    (GRPOConfig(scale_rewards="batch"), {"advantage": "batch"}),
    (GRPOConfig(multi_objective_aggregation="normalize_then_sum"), {"advantage": "gdpo"}),
    (GRPOConfig(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4), {"algorithm": "gspo"}),
    (GRPOConfig(loss_type="luspo"), {"objective": "ppo_clip", "normaliser": "rollouts", "clip_low": 0.2}),
    (GRPOConfig(loss_type="luspo", importance_sampling_level="sequence"), {"objective": "gspo"}),
    (GRPOConfig(loss_type="cispo", epsilon=0.1, epsilon_high=5.0, delta=2.0), {"clip_high": 4.0, "delta": 4.0}),
    (GRPOConfig(loss_type="sapo", sapo_temperature_neg=1.2, epsilon=0.1), {"sapo_temperature_neg": 1.2}),
    (GRPOConfig(loss_type="vespo", vespo_k_pos=1.0, use_vllm=True), {"vespo_k_pos": 1.0, "correction": "none"}),
    (GRPOConfig(sapo_temperature_neg=1.2), {"sapo_temperature_neg": 1.05}),
    (GRPOConfig(delta=2.0), {"delta": 2.0}),
    (GRPOConfig(beta=0.04), {"kl_coef": 0.04, "kl_in_reward": False, "kl_bias_correction": True}),
    (GRPOConfig(beta=0.04, use_bias_correction_kl=False), {"kl_bias_correction": False}),
    (GRPOConfig(use_bias_correction_kl=False), {"kl_bias_correction": True}),
    (GRPOConfig(beta=0.1, sync_ref_model=True), {"reference_sync_steps": 512, "reference_mixup": 0.6}),
    (RLOOConfig(sync_ref_model=True, ref_model_sync_steps=9, ref_model_mixup_alpha=1.0), {"reference_sync_steps": 9}),
    (GRPOConfig(top_entropy_quantile=0.2, entropy_coef=0.01), {"top_entropy_quantile": 0.2, "entropy_coef": 0.01}),
    (GRPOConfig(off_policy_mask_threshold=0.5), {"off_policy_mask_threshold": 0.5}),
    (GRPOConfig(router_aux_loss_coef=0.001), {"router_aux_loss_coef": 0.001}),
    (
        GRPOConfig(use_vllm=True),
        {"correction": "sequence_mask", "correction_low": 0, "correction_high": 3.0, "proximal": "recomputed"},
    ),
    (GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=False), {"correction": "none"}),
    (
        GRPOConfig(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=None),
        {"correction": "token_mask", "correction_low": 0, "correction_high": 1e6},
    ),
    (
        GRPOConfig(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_min=0.5),
        {"correction": "token_truncate", "correction_low": 0.5},
    ),
    (GRPOConfig(vllm_importance_sampling_cap=2.0), {"correction_high": 2.0}),
    (GRPOConfig(slipstream={"learner": {"algorithm": "tis"}}), {"objective": "reinforce", "clip_high": 0.28}),
    (GRPOConfig(learning_rate=1e-5, slipstream={"learner": {"algorithm": "cispo"}}), {"clip_high": 4.0}),
]


@pytest.mark.parametrize(("config", "settings"), OBJECTIVES, ids=str)
def test_what_trl_learns_is_what_the_run_learns(config: _Config, settings: dict[str, Any]) -> None:
    made = RunConfig.model_validate({**sections_of(config), "task": {"path": "task.py:trainer"}}).learner
    assert {name: getattr(made, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GRPOConfig(), "no bound holds the ratio of bad tokens.*'delta': 4.0"),
        (GRPOConfig(loss_type="bnpo"), "tokens of the whole step"),
        (GRPOConfig(use_vllm=True), "sequence_mask.*correction=False"),
        (GRPOConfig(cast_lm_head_to_fp32=True), "cast_lm_head_to_fp32=True has no effect here"),
    ],
    ids=str,
)
def test_what_differs_is_told(config: _Config, says: str) -> None:
    assert [note for note in translate(config, "org/model", None).notes if re.search(says, note)]


def test_what_a_config_comes_to_is_a_run_file() -> None:
    large = GRPOConfig(num_generations=512, per_device_train_batch_size=512)
    for config in (GRPOConfig(), RLOOConfig(), AsyncGRPOConfig(), large):
        for context in (None, 400, 4096):
            RunConfig.model_validate({**sections_of(config, context), "task": {"path": "task.py:trainer"}})


def test_a_share_of_the_steps_is_a_number_of_them() -> None:
    made = translate(GRPOConfig(max_steps=50, save_steps=0.1, eval_strategy="steps", eval_steps=0.25), "m/m", None)
    assert made.sections["learner"]["checkpoint_every"] == 5
    assert made.sections["eval"]["every"] == 13


def test_a_broken_reward_ends_the_run_after_few_rows() -> None:
    assert translate(GRPOConfig(), "m/m", None).sections["rollout"]["give_up_after"] == 4
    own = GRPOConfig(slipstream={"rollout": {"give_up_after": 0}})
    assert translate(own, "m/m", None).sections["rollout"]["give_up_after"] == 0


def test_the_context_of_a_small_model_bounds_the_lengths() -> None:
    made = sections_of(GRPOConfig(), context=256)
    assert (made["vllm"]["max_model_len"], made["rollout"]["max_turn_tokens"]) == (256, 255)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GRPOConfig(loss_type="ppo"), "loss_type='ppo'.*write loss_type='grpo' or loss_type='bnpo'"),
        (GRPOConfig(loss_type=None), "loss_type=None.*write loss_type='grpo'"),
        (GRPOConfig(scale_rewards="std"), "scale_rewards='std'.*write scale_rewards='group'"),
        (GRPOConfig(loss_type="cispo", epsilon_high=0), r"loss_type='cispo', epsilon_high=0.*write epsilon_high=5\.0"),
        (GRPOConfig(loss_type="sapo", importance_sampling_level="sequence"), "'sequence'.*'sapo'.*leave it out"),
        (GRPOConfig(sync_ref_model=True), "sync_ref_model=True.*set beta"),
        (GRPOConfig(vllm_importance_sampling_clip_max=0.5), "clip_max=0.5.*give 1 or more"),
        (GRPOConfig(vllm_importance_sampling_cap=0.5), "sampling_cap=0.5.*give 1 or more"),
        (GRPOConfig(vllm_importance_sampling_clip_min=2), "clip_min=2.*give 1 or less"),
        (GRPOConfig(epsilon="0.2"), "epsilon='0.2'.: must be a number"),
        (
            GRPOConfig(epsilon=0.1, slipstream={"learner": {"algorithm": "tis"}}),
            r"epsilon=0\.1.* next to slipstream=.*'tis'.*leave epsilon out",
        ),
        (GRPOConfig(num_iterations=0), "num_iterations=0.*must be a whole number of at least 1"),
        (GRPOConfig(use_adaptive_entropy=True), "use_adaptive_entropy=True.*write use_adaptive_entropy=False"),
        (GRPOConfig(lr_scheduler_kwargs="{"), "lr_scheduler_kwargs='{'.: give a dict"),
        (GRPOConfig(optim_args="momentum"), "optim_args='momentum'.: write name=value"),
        (GRPOConfig(eval_strategy="epoch"), "eval_strategy='epoch'. is not .* rows .*write eval_strategy='steps' with"),
        (GRPOConfig(save_strategy="epoch"), "save_strategy='epoch'. is not .* rows .*write save_strategy='steps' with"),
        (GRPOConfig(eval_strategy="stps"), "eval_strategy='stps'. is not known; write eval_strategy='steps'"),
        (GRPOConfig(eval_strategy="steps", eval_steps=-2), r"eval_steps=-2. with .*must be a whole number of steps"),
        (GRPOConfig(eval_strategy="steps", eval_steps=0), r"eval_steps=0. with .*must be a whole number of steps"),
        (GRPOConfig(eval_strategy="steps", eval_steps=2.5), r"eval_steps=2\.5. with .*must be a whole number of steps"),
        (GRPOConfig(eval_strategy="steps", logging_steps=0), r"logging_steps=0. with .*write eval_steps=20"),
        (
            GRPOConfig(eval_strategy="steps", num_generations_eval=0),
            r"num_generations_eval=0.: must be a whole number of at least 1; leave it out for as many",
        ),
        (GRPOConfig(eval_strategy="steps", eval_steps=0.1), r"eval_steps=0\.1.*give a whole number, or max_steps"),
        (GRPOConfig(hub_strategy="checkpoint"), "hub_strategy='checkpoint'.*write hub_strategy='every_save' or 'end'"),
        (GRPOConfig(hub_revision="v2"), "hub_revision='v2'.*main branch; leave it out"),
        (GRPOConfig(per_device_train_batch_size=4), "= 4 completions a step are not a multiple of num_generations = 8"),
        (
            GRPOConfig(num_generations=1),
            r"GRPOConfig.num_generations=1.: must be at least 2, .*; write num_generations=8",
        ),
        (RLOOConfig(num_generations=0), r"RLOOConfig.num_generations=0.: must be at least 2"),
        (GRPOConfig(loss_type="gspo"), r"'gspo'. is not supported.*; write importance_sampling_level='sequence', with"),
        (GRPOConfig(num_generations="8"), "num_generations='8'.: must be a number"),
        (
            GRPOConfig(load_best_model_at_end=True, metric_for_best_model="eval_loss"),
            "metric_for_best_model='eval_loss'. is not supported; write "
            "metric_for_best_model='reward' or metric_for_best_model='eval_reward'",
        ),
        (GRPOConfig(greater_is_better=False), "greater_is_better=False. is not supported"),
        (GRPOConfig(save_strategy="best"), "save_strategy='best' is not supported"),
        (GRPOConfig(fsdp="hybrid_shard auto_wrap"), "fsdp='hybrid_shard auto_wrap' is not supported.*write fsdp=True"),
        (GRPOConfig(deepspeed="zero3.json"), "deepspeed='zero3.json'.*fsdp=True"),
        (GRPOConfig(warmup_steps=0.1), "max_steps is not given"),
        (GRPOConfig(model_init_kwargs={"quantization_config": 3}), "{'quantization_config': 3} is not"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_kept_is_refused_with_its_remedy(config: _Config, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        translate(config, "org/model", None)


@pytest.mark.parametrize("fsdp", [True, "full_shard", "full_shard auto_wrap", ["full_shard"]])
def test_fsdp_shares_the_weights_out(fsdp: Any) -> None:
    assert translate(GRPOConfig(fsdp=fsdp), "org/model", None).sections["learner"]["shard_weights"]
    for none in (None, "", [], False):
        assert "shard_weights" not in translate(GRPOConfig(fsdp=none), "org/model", None).sections["learner"]


@pytest.mark.parametrize(
    ("kind", "field", "says"),
    [
        (
            GRPOConfig,
            "num_generation",
            r"GRPOConfig\(num_generation=...\) is not .*did you mean num_generations\?",
        ),
        (
            AsyncGRPOConfig,
            "beta",
            r"AsyncGRPOConfig\(beta=...\) is not a field of TRL's AsyncGRPOConfig: here it .*kl_coef",
        ),
        (RLOOConfig, "scale_rewards", r"not a field of TRL's RLOOConfig: .*\{'learner': \{'advantage': \.\.\.\}\}$"),
        (
            GRPOConfig,
            "max_stalenes",
            r": did you mean max_staleness, which is a setting here .*\{'queue': \{'max_staleness': \.\.\.\}\}\?$",
        ),
        (AsyncGRPOConfig, "max_stalenes", r": did you mean max_staleness\?$"),
        (GRPOConfig, "groups_per_step", r": here it is a setting: slipstream=\{'learner': \{'groups_per_step': "),
        (GRPOConfig, "warmup_ratio", r": it is gone there; write warmup_steps"),
        (GRPOConfig, "vllm_devic", r": did you mean"),
        (RLOOConfig, "rloo_k", r": it is gone there; write num_generations$"),
        (GRPOConfig, "batch_size", r": write per_device_train_batch_size$"),
        (GRPOConfig, "epochs", r": write num_train_epochs$"),
        (AsyncGRPOConfig, "use_vllm", r": it is one of other configs; leave it out$"),
        (GRPOConfig, "xyzzy", r": settings that TRL has no name for go into slipstream="),
    ],
)
def test_what_is_no_field_of_trl_s_is_refused(kind: type[_Config], field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kind(**{field: 1})
    with pytest.raises(ConfigError, match=says):
        setattr(kind(), field, 1)


@pytest.mark.parametrize(
    "how",
    [
        lambda: GRPOConfig(num_generation=8),
        lambda: GRPOTrainer("org/model", accuracy, RLOOConfig(), ROWS),
        lambda: RLOOTrainer("./no_such_folder", accuracy, RLOOConfig(), ROWS).train(),
    ],
)
def test_a_refusal_shows_no_frames_beneath_the_call(how: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        how()
    frames = traceback.extract_tb(raised.tb)
    assert [Path(frame.filename).name for frame in frames][-2:] == ["test_trl.py", "script.py"]


def test_a_field_of_a_newer_trl_is_told_from_a_misspelt_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "async_grpo_config.py"
    file.write_text("class AsyncGRPOConfig(_BaseConfig):\n    later: int = 3\n")
    trl = SimpleNamespace(version="9.0", files=[SimpleNamespace(name=file.name, locate=lambda: file)])
    monkeypatch.setattr("slipstream.trl.configs.distribution", lambda name: trl)
    with pytest.raises(ConfigError, match=r"TRL 9\.0, which is installed, has it"):
        AsyncGRPOConfig(later=4)
    with pytest.raises(ConfigError, match="settings that TRL has no name for"):
        GRPOConfig(later=4)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from slipstream.trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer", None),
        (
            "from slipstream.trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker",
            "TRL 1.18 removed .*write: from slipstream.trl import AsyncGRPOConfig, AsyncGRPOTrainer$",
        ),
        ("from slipstream.trl.trainer.grpo_trainer import GRPOTrainer", None),
        ("from slipstream.trl.trainer.async_grpo_config import AsyncGRPOConfig", None),
        ("from slipstream.trl.trainer import RLOOTrainer", None),
        (
            "from slipstream.trl.trainer.async_grpo_trainer import AsyncRolloutLoop",
            "has AsyncGRPOTrainer, not AsyncRolloutLoop; workers are processes of the run; .*rollout_func or an agent",
        ),
        ("import slipstream.trl.generation.async_vllm_client", "the run starts vLLM and talks to it by itself"),
        ("import slipstream.trl.trainer.dpo_trainer", "not trl.trainer.dpo_trainer; import it from TRL"),
        ("import slipstream.trl.models_x", "not trl.models_x; import it from TRL: from trl.models_x import ...$"),
        ("from slipstream.trl import SFTTrainer", "not SFTTrainer; import it from TRL: from trl import SFTTrainer$"),
    ],
)
def test_an_import_that_is_not_here_says_where_it_is(line: str, says: str | None) -> None:
    if says is None:
        exec(line, {})
        return
    with pytest.raises(ImportError, match=says):
        exec(line, {})


def test_what_is_ignored_is_listed_in_one_line() -> None:
    notes = translate(GRPOConfig(use_vllm=False, vllm_mode="colocate", pad_to_multiple_of=None), "m/m", None).notes
    (listed,) = (note for note in notes if note.startswith("taken, and without a meaning here"))
    assert "here: use_vllm, vllm_mode (" in listed
    assert not [note for note in translate(GRPOConfig(), "m/m", None).notes if "without a meaning" in note]


def test_a_default_that_is_not_trl_s_is_said_until_the_script_decides() -> None:
    (said,) = (note for note in translate(GRPOConfig(), "m/m", None).notes if note.startswith("left out, and by"))
    assert "bf16 (True there; here model.dtype = " in said
    loaded = GRPOConfig(model_init_kwargs={"dtype": "bfloat16"})
    assert not [note for note in translate(loaded, "m/m", None).notes if "bf16" in note]
    decided = GRPOConfig(bf16=True, gradient_checkpointing=False, save_total_limit=3)
    assert not [note for note in translate(decided, "m/m", None).notes if note.startswith("left out, and by")]


def test_what_has_no_effect_is_said() -> None:
    made = translate(GRPOConfig(eval_delay=3, full_determinism=True, tf32=True), "org/model", None)
    assert [note for note in made.notes if note.startswith("eval_delay=3 has no effect here")]
    assert [note for note in made.notes if note.startswith("full_determinism=True has no effect")]
    quiet = translate(GRPOConfig(report_to="none", gradient_checkpointing=True, torch_compile=False), "org/model", None)
    assert quiet.sections["learner"]["gradient_checkpointing"] is True
    assert quiet.sections["learner"]["compile"] is False
    assert len(quiet.notes) == len(made.notes) - 3
    assert not [note for note in quiet.notes if "gradient_checkpointing" in note]


def test_a_field_can_be_read_and_set_as_in_trl() -> None:
    config = GRPOConfig("out", max_steps=3)
    config.learning_rate = 2e-5
    assert (config.output_dir, config.max_steps, config.num_generations) == ("out", 3, 8)
    assert sections_of(config)["learner"]["learning_rate"] == 2e-5
    with pytest.raises(AttributeError):
        _ = config.no_such_thing


class Model:
    """As a transformers model is given."""


class Adapted:
    """As a model of peft is."""

    def save_pretrained(self) -> None: ...

    peft_config: dict[str, Any] = {}  # noqa: RUF012


class Tokenizer:
    name_or_path = "org/tokenizer"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": Model()}, r"GRPOTrainer\(model=Model\).*as text, or an object of transformers"),
        (
            {"model": Adapted(), "peft_config": Model()},
            r"model=Adapted, peft_config=.*has an adapter already; give model",
        ),
        ({"model": Adapted()}, r"GRPOTrainer\(model=Adapted\) has 0 adapters"),
        ({"peft_config": Model()}, r"peft_config=Model\) is not supported: the adapter is LoRA"),
        ({"quantization_config": Model()}, r"quantization_config=Model\) is not supported; give a BitsAndBytesConfig"),
        ({"args": GRPOConfig(optim="lomo")}, r"GRPOConfig\(optim='lomo'\): learner.optim = \"lomo\": must be "),
        ({"callbacks": [Model()]}, r"callbacks=.*a Model is no callback; .*transformers\.TrainerCallback"),
        (
            {"args": GRPOConfig(report_to="neptune")},
            "report_to='neptune'.*no tracker 'neptune': choose among tensorboard",
        ),
        ({"args": GRPOConfig(hub_model_id="a/b/c")}, "hub_model_id='a/b/c'.: hub.hub_model_id"),
        ({"optimizers": (Model(), None)}, "optimizers="),
        ({"rollout_worker": accuracy}, "rollout_worker="),
        ({"processing_class": object()}, "processing_class=object.*give an object of transformers"),
        ({"environment_factory": Model}, r"GRPOTrainer\(environment_factory=\.\.\.\): Model has no method reset"),
        ({"args": Model()}, "import GRPOConfig from slipstream.trl, too"),
        ({"args": RLOOConfig(beta=0)}, "import GRPOConfig from slipstream.trl, too"),
        ({"args": GRPOConfig(num_iterations=0)}, "num_iterations=0"),
        ({"train_dataset": None}, "GRPOTrainer: a `train_dataset` is required where no environment"),
        ({"reward_funcs": None}, r"GRPOTrainer\(reward_funcs=\(\)\): give a list of at least one reward"),
        ({"train_dataset": [{"text": "a"}]}, r"GRPOTrainer\(train_dataset=...\): the first row has no 'prompt' column"),
        (
            {"args": GRPOConfig(reward_weights=[1, 2])},
            r"GRPOConfig\(reward_weights=\[1, 2\]\): give one number for each",
        ),
        ({"tokenizer": "m/m"}, r"GRPOTrainer\(tokenizer=...\) is not an argument of TRL's .*: write processing_class$"),
        ({"max_steps": 3}, r"it is a field of GRPOConfig; write args=GRPOConfig\(max_steps=...\)$"),
        ({"reward_fncs": accuracy}, r"did you mean reward_funcs\?$"),
        ({"args": GRPOConfig(num_generations=7.5)}, r"num_generations=7.5\): must be a whole number$"),
        ({"args": GRPOConfig(bf16="yes")}, r"bf16='yes'\): write True or False$"),
        ({"args": GRPOConfig(report_to=3)}, r"report_to=3\): give a tracker's name"),
        ({"args": GRPOConfig(reward_weights="1.0")}, r"reward_weights='1.0'\): give a number for each"),
        ({"args": GRPOConfig(bf16=True, fp16=True)}, r"bf16=True, fp16=True\): the weights have one type"),
        ({"args": GRPOConfig(report_to=["none", "wandb"])}, "says both none and some; leave 'none' out"),
        ({"args": GRPOConfig(max_steps=2.5)}, r"max_steps=2.5\): must be a whole number$"),
        ({"args": GRPOConfig("..")}, r"output_dir='\.\.': give a folder"),
        (
            {"args": GRPOConfig(save_steps=0)},
            r"save_steps=0\) with save_strategy='steps': .*write save_steps=50, or save_str",
        ),
        (
            {"args": GRPOConfig(save_steps=0.1)},
            "save_steps=0.1. is a share of the steps.*give a whole number, or max_steps",
        ),
        (
            {"args": GRPOConfig(load_best_model_at_end=True)},
            r"load_best_model_at_end=True\): .* evaluation of its own step; write eval_strategy='steps' and save_st",
        ),
        (
            {"args": GRPOConfig(multi_objective_aggregation="x")},
            r"'x'\) is not supported; write multi_objective_aggregation='sum_then_normalize' or",
        ),
        ({"args": GRPOConfig(eval_strategy="steps")}, "eval_strategy='steps' without an eval_dataset; give one"),
        ({"args": GRPOConfig(eval_on_start=True)}, "eval_on_start=True without an eval_dataset; give one"),
    ],
)
def test_an_argument_that_cannot_be_kept_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GRPOTrainer(**{"model": "org/model", "reward_funcs": accuracy, "train_dataset": ROWS, **changes})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (GRPOConfig(beta=-0.1), "GRPOConfig(beta=-0.1): learner.kl_coef = -0.1: must be at least 0"),
        (GRPOConfig(epsilon=0), "GRPOConfig(epsilon=0): learner.clip_low = 0: must be above 0"),
        (GRPOConfig(temperature=0), "GRPOConfig(temperature=0): rollout.temperature = 0: must be at least 0.01"),
        (
            GRPOConfig(delta=1.1),
            "GRPOConfig(delta=1.1): learner.delta = 1.1: must be above 1 + learner.clip_high = 1.2",
        ),
        (GRPOConfig(learning_rate=-1.0), "GRPOConfig(learning_rate=-1.0): learner.learning_rate = -1.0: must be above"),
        (GRPOConfig(top_entropy_quantile=2), "GRPOConfig(top_entropy_quantile=2): learner.top_entropy_quantile = 2"),
        (GRPOConfig(adam_beta1=1.5), "GRPOConfig(adam_beta1=1.5): learner.betas[0] = 1.5: must be below 1"),
        (GRPOConfig(top_k=500), "GRPOConfig(top_k=500): rollout.top_k = 500: vLLM's log-probs"),
    ],
    ids=str,
)
def test_a_value_out_of_bounds_is_refused_at_once_under_trl_s_name(
    args: GRPOConfig, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        GRPOTrainer("org/model", accuracy, args, ROWS)
    assert str(error.value).startswith(says)
    assert capsys.readouterr().err == "", "notes come after it"


def test_a_setting_that_the_script_gives_by_our_name_is_left_to_the_start() -> None:
    GRPOTrainer("org/model", accuracy, GRPOConfig(beta=0.1, slipstream={"learner": {"kl_coef": -1.0}}), ROWS)


def test_a_tokenizer_of_its_own_is_taken_by_its_name() -> None:
    trainer = GRPOTrainer("org/model", accuracy, None, ROWS, processing_class=Tokenizer())
    assert trainer.translated(None).sections["model"]["tokenizer"] == "org/tokenizer"
    Tokenizer.name_or_path = "org/model"
    trainer = GRPOTrainer("org/model", accuracy, None, ROWS, processing_class=Tokenizer())
    assert "tokenizer" not in trainer.translated(None).sections["model"]


def with_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "MARKER" + tokenizer.chat_template


def with_a_token(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<verdict>"])


def with_another_end(tokenizer: Any) -> None:
    tokenizer.eos_token = "<|endoftext|>"


def with_a_reader(tokenizer: Any) -> None:
    tokenizer.response_template = {"fields": {"content": {}}}


def padded(tokenizer: Any) -> None:
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"


def nameless(tokenizer: Any) -> None:
    tokenizer.name_or_path = ""
    with_a_token(tokenizer)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        *((change, True) for change in (with_template, with_a_token, with_another_end, with_a_reader, nameless)),
        (padded, False),
    ],
)
def test_a_tokenizer_that_the_script_has_changed_is_the_run_s(
    change: Any, changed: bool, model_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    args = GRPOConfig(str(tmp_path / "mine"))
    trainer = GRPOTrainer(str(model_folder), accuracy, args, ROWS, processing_class=tokenizer)
    change(tokenizer)  # scripts do that after the trainer is made, too
    trainer._save_object()
    used = trainer.translated(None).sections["model"].get("tokenizer")
    assert (used is not None) is changed
    if used is not None:
        saved = AutoTokenizer.from_pretrained(used)
        assert saved.get_vocab() == tokenizer.get_vocab()
        for name in ("chat_template", "eos_token", "response_template"):
            assert getattr(saved, name, None) == getattr(tokenizer, name, None)


trainer = RLOOTrainer(
    "org/model",
    accuracy,
    RLOOConfig(
        "rloo", beta=0.0, reward_weights=[2.0], slipstream={"task": {"reward_servers": {"org/judge": "http://j"}}}
    ),
    ROWS,
)


def test_train_resumes_and_gives_what_transformers_gives(
    supervised: list[tuple[RunConfig, bool]], model_folder: Path
) -> None:
    trainer.model = str(model_folder)
    result = trainer.train(resume_from_checkpoint=True)
    assert result == TrainOutput(5, 2.0, result.metrics)
    assert (result.metrics["train_loss"], result.metrics["train_runtime"]) == (2.0, 9.0)
    assert result.metrics["reward_last10"] == 0.5
    ((config, resume),) = supervised
    assert resume
    assert config.task.path == f"{__file__}:trainer"
    assert config.task.reward_servers == {"org/judge": "http://j"}
    assert load_task(config.task).reward_weights == [2.0]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            lambda: trainer.train("runs/a/checkpoint-5"),
            "a run continues from its newest checkpoint, and rloo holds none",
        ),
        (trainer.push_to_hub, "push_to_hub.*holds no checkpoint; call it after train"),
        (GRPOTrainer("./nowhere", accuracy, None, ROWS).train, "is not a global of any module"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(how: Any, says: str, supervised: Any) -> None:
    with pytest.raises(ConfigError, match=says):
        how()


@pytest.mark.parametrize(
    ("resume", "says"), [(False, "continue with it by {}, or choose"), (True, "start it without {}")]
)
def test_refusals_speak_of_trl_s_arguments(
    supervised: Any, monkeypatch: pytest.MonkeyPatch, model_folder: Path, resume: bool, says: str
) -> None:
    def check(config: RunConfig, resume: bool) -> None:
        if not resume:
            save_checkpoints(config.run_dir, 5)
        run_directory.check_run_directory(config, resume)

    monkeypatch.setattr(script_module, "supervise", check)
    monkeypatch.setenv("SLIPSTREAM_RESUME", "")
    trainer.model = str(model_folder)
    with pytest.raises(ConfigError) as error:
        trainer.train(resume_from_checkpoint=resume)
    assert says.format("resume_from_checkpoint=True") in str(error.value)
    assert "--" not in str(error.value)
    assert ("another name: output_dir='rloo-2'" in str(error.value)) is not resume


def test_under_accelerate_launch_the_first_process_runs_everything(
    monkeypatch: pytest.MonkeyPatch,
    supervised: list[tuple[RunConfig, bool]],
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer.model = str(model_folder)
    monkeypatch.setenv(PROCESSES, "")  # what the trainer sets is taken back with it
    alone = trainer.translated(None).sections["learner"]["groups_per_step"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert (ended.value.code, supervised) == (0, [])
    monkeypatch.setenv("RANK", "0")
    trainer.train()
    assert len(supervised) == 1
    assert "WORLD_SIZE = 8: the first process runs everything" in capsys.readouterr().err
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} & {*os.environ}
    ((config, _),) = supervised
    of_all = trainer.translated(None).sections["learner"]["groups_per_step"]  # after the launcher is hidden, too
    assert (config.learner.groups_per_step, of_all) == (8 * alone, 8 * alone)


def test_a_step_has_the_completions_of_all_processes_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 6}
    with pytest.raises(ConfigError, match="= 8 completions a step"):
        GRPOTrainer("org/model", accuracy, GRPOConfig(**args), ROWS).translated(None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    made = GRPOTrainer("org/model", accuracy, GRPOConfig(**args), ROWS).translated(None)
    assert made.sections["learner"]["groups_per_step"] == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="x 2 processes = 16 completions"):
        GRPOTrainer("org/model", accuracy, GRPOConfig(**args), ROWS).translated(None)


def test_importing_it_loads_no_torch_and_no_trl() -> None:
    code = "import sys, slipstream.trl\nassert not {'torch', 'trl'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_no_refusal_is_without_a_remedy() -> None:
    from slipstream.trl.fields import FIELDS

    for field in FIELDS.values():
        if field.how != "only":
            continue
        letter = next((letter for letter in "GRA" if letter in field.of), "G")
        kind = {"G": GRPOConfig, "R": RLOOConfig, "A": AsyncGRPOConfig}[letter]
        given = {field.name: "unheard of"}
        with pytest.raises(ConfigError, match=rf"{re.escape(field.name)}='unheard of'.*(write|leave it out)"):
            translate(kind(**given), "org/model", None)


HEAD = """
import json
from slipstream.trl import GRPOConfig, GRPOTrainer

def accuracy(completions, **columns):
    return [0.0] * len(completions)
"""


def test_train_at_the_top_level_runs_everything_and_its_check_imports_the_script(script: Script) -> None:
    """The real supervisor, and the real check of the task in its own process; the rest is a stand-in."""
    stand_in(script, "echo '{\"steps\": 5}' >runs/mine/summary.json; exit 0")
    made = f"GRPOConfig('runs/mine', max_steps=5, slipstream=dict({sections()[len('model=MODEL, ') :]}))"
    script.write(
        PATCHED
        + f"trainer = GRPOTrainer(MODEL['path'], accuracy, {made}, [{{'prompt': 'Multiply 2 by 3.'}}])\n"
        + "print('trained', trainer.train().global_step)",
        HEAD,
    )
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "trained 5"
    assert f'path = "{script.path}:trainer"' in (script.folder / "runs" / "mine" / "run.toml").read_text()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"eval_steps": 20, "num_generations_eval": 2, "per_device_eval_batch_size": 4, "do_eval": True}, None),
        ({"eval_strategy": "steps", "eval_steps": 20}, {"every": 20, "at_start": False, "group_size": 8}),
        ({"eval_strategy": "steps"}, {"every": 10, "at_start": False, "group_size": 8}),
        ({"eval_strategy": "steps", "logging_steps": 10}, {"every": 10, "at_start": False, "group_size": 8}),
        (
            {"eval_strategy": "steps", "eval_steps": 0.1, "max_steps": 200, "num_generations_eval": 1},
            {"every": 20, "at_start": False, "group_size": 1},
        ),
        ({"eval_on_start": True}, {"every": 0, "at_start": True, "group_size": 8}),
    ],
)
def test_evaluation_is_trls(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert translate(GRPOConfig(**fields), "org/model", None).sections.get("eval") == expected


def test_trackers_and_the_hub_are_set_by_trl_s_names() -> None:
    config = GRPOConfig(
        "runs/sums",
        report_to="wandb",
        run_name="third",
        project="sums",
        trackio_space_id="org/space",
        log_completions=True,
        logging_steps=5,
        push_to_hub=True,
        hub_model_id="org/sums",
        hub_private_repo=True,
        hub_strategy="end",
        hub_token="hf_secret",
    )
    made = sections_of(config)
    assert made["tracking"] == {
        "report_to": ["wandb"],
        "run_name": "third",
        "project": "sums",
        "rollouts_every": 5,
        "options": {"trackio": {"space_id": "org/space"}},
    }
    assert made["hub"] == {
        "push_to_hub": True,
        "hub_model_id": "org/sums",
        "hub_private_repo": True,
        "hub_strategy": "end",
    }
    assert "hf_secret" not in str(made)


@pytest.mark.parametrize(("given", "trackers"), [("none", []), ([], []), (["wandb", "trackio"], ["wandb", "trackio"])])
def test_report_to_is_taken_as_transformers_takes_it(given: Any, trackers: list[str]) -> None:
    assert (
        resolve(
            None,
            overrides({**sections_of(GRPOConfig(report_to=given)), "task": {"path": "a.py:b"}}),
            "test",
        ).tracking.report_to
        == trackers
    )


class Stops:
    """As a callback is, to a script that does not import transformers."""

    def on_train_begin(self, *_: Any, **__: Any) -> None: ...


def test_callbacks_are_named_by_their_trainer_for_the_learner(
    supervised: list[tuple[RunConfig, bool]], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.model = str(model_folder)
    monkeypatch.setattr(trainer, "callbacks", [])
    monkeypatch.setitem(trainer.args.given, "hub_token", "hf_secret")
    monkeypatch.setenv("HF_TOKEN", "other")
    trainer.add_callback(Stops())
    trainer.train()
    ((config, _),) = supervised
    assert config.learner.callbacks == [f"{__file__}:trainer"]
    assert os.environ["HF_TOKEN"] == "hf_secret"


def test_the_newest_model_goes_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    sent: list[Any] = []

    class Hub:
        def __init__(self, token: str | None = None) -> None:
            sent.append(token)

        def create_repo(self, name: str, **given: Any) -> Any:
            sent.append((name, given))
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **given: Any) -> str:
            sent.append(given)
            return "commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    args = GRPOConfig(str(tmp_path / "sums"), hub_private_repo=True, hub_token="t")
    pushing = GRPOTrainer("org/model", accuracy, args, ROWS)
    model = tmp_path / "sums" / "checkpoints" / "step-000004" / "model"
    model.mkdir(parents=True)
    (model.parent / "state.json").write_text("{}")
    assert pushing.push_to_hub("done") == "commit"
    assert sent == [
        "t",
        ("sums", {"private": True, "exist_ok": True}),
        {"repo_id": "me/sums", "folder_path": model, "commit_message": "done"},
    ]
    monkeypatch.setattr(Hub, "upload_folder", lambda *_, **__: (tmp_path / "not there").read_text())
    with pytest.raises(
        ConfigError, match=r"push_to_hub\(\): sums was not uploaded: FileNotFoundError.*hf upload sums /"
    ):
        pushing.push_to_hub()


def test_an_adapter_goes_to_the_hub_as_save_model_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    sent: list[str] = []

    class Hub:
        def __init__(self, token: str | None = None) -> None: ...

        def create_repo(self, name: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, folder_path: Path, **_: Any) -> None:
            sent.extend(str(file.relative_to(folder_path)) for file in sorted(folder_path.rglob("*.json")))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    trainer = GRPOTrainer("org/model", accuracy, GRPOConfig(str(tmp_path / "sums")), ROWS)
    save_checkpoints(trainer.run_dir, 4)
    (adapter := trainer.run_dir / "checkpoints" / "step-000004" / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    trainer.push_to_hub()
    assert sent == ["adapter_config.json", "merged/config.json"]


def metrics(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": 0,
        "loss": step / 10,
        "reward": 0.5,
        "num_tokens": 100 * step,
        "eval/reward": 9,
        **more,
    }


def journals(run_dir: Path, steps: int) -> None:
    """Write what a run of some steps with an evaluation of step 1 leaves."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(metrics(step)) + "\n" for step in range(1, steps + 1))
    (run_dir / "metrics.jsonl").write_text(lines + '{"step": 99')
    evaluation = {"step": 1, "reward": 0.7, "seconds": 2.0, "rewards": {"accuracy": 0.7}, "mean_length": None}
    (run_dir / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    (run_dir / "summary.json").write_text(json.dumps({"steps": steps, "wall_s": 4.0}))


def test_the_state_is_that_of_transformers(tmp_path: Path) -> None:
    journals(tmp_path / "mine", 2)
    save_checkpoints(tmp_path / "mine", 1)
    checkpoints.write_best(tmp_path / "mine", Best(1, 0.7))
    state = read_state(tmp_path / "mine", [{"own": 1.0, "step": 2}])
    assert (state.global_step, state.num_input_tokens_seen, state.best_metric, state.best_global_step) == (
        2,
        200,
        0.7,
        1,
    )
    assert state.best_model_checkpoint == str(tmp_path / "mine" / "checkpoints" / "step-000001")
    first, evaluation, second, own, end = state.log_history
    assert (first["loss"], first["step"], second["loss"]) == (0.1, 1, 0.2)
    assert "eval/reward" not in first
    assert evaluation == {
        "eval_reward": 0.7, "eval_runtime": 2.0, "eval_rewards/accuracy/mean": 0.7, "epoch": 0.0, "step": 1
    }  # fmt: skip
    assert own == {"own": 1.0, "step": 2}
    assert end == {
        "train_loss": pytest.approx(0.15), "train_runtime": 4.0, "train_steps_per_second": 0.5, "epoch": 0, "step": 2,
        "num_tokens": 200, "reward": 0.5,
    }  # fmt: skip
    state.save_to_json(tmp_path / "state.json")
    assert json.loads((tmp_path / "state.json").read_text())["global_step"] == 2


def test_epochs_are_fractions_where_the_rows_are_counted(tmp_path: Path) -> None:
    journals(tmp_path / "mine", 3)
    state = read_state(tmp_path / "mine", (), steps_per_epoch=2.0)
    assert state.epoch == 1.5
    assert [entry["epoch"] for entry in state.log_history] == [0.5, 0.5, 1.0, 1.5, 1.5]
    fresh = GRPOTrainer(
        "org/model",
        accuracy,
        GRPOConfig(str(tmp_path / "other"), max_steps=7, generation_batch_size=8),
        [*ROWS] * 2,
    )
    journals(fresh.run_dir, 3)
    fresh._trained = True
    steps = fresh.translated(None).sections["learner"]["groups_per_step"]
    assert fresh.state.epoch == 3 * steps / (2 * len(ROWS))


def test_a_model_is_saved_before_it_trains_as_it_is(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    TOKENIZER.save_pretrained(model)
    GRPOTrainer(str(model), accuracy, GRPOConfig(str(tmp_path / "mine")), ROWS).save_model(tmp_path / "saved")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(after[name].equal(value) for name, value in before.items())
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    changed = tiny_model()
    changed.generation_config.min_p = 0.1  # without do_sample
    save_object(changed, TOKENIZER, tmp_path / "object")
    assert json.loads((tmp_path / "object" / "generation_config.json").read_bytes())["min_p"] == 0.1
    for folder in ("saved", "object"):
        assert len({file.stat().st_mode for file in (tmp_path / folder).iterdir()}) == 1, "others may read all, or none"


def test_a_run_of_before_is_not_the_trainer_s(tmp_path: Path) -> None:
    """Not until it trains."""
    fresh = GRPOTrainer("org/model", accuracy, GRPOConfig(str(tmp_path / "mine"), max_steps=7), ROWS)
    journals(fresh.run_dir, 2)
    fresh.log({"mine": 1.0})
    assert fresh.state.log_history == [{"mine": 1.0, "epoch": 0.0, "step": 0}]
    assert (fresh.state.max_steps, fresh.state.best_metric) == (7, None)


def test_the_face_of_transformers_trainer(
    supervised: list[tuple[RunConfig, bool]], model_folder: Path, tmp_path: Path
) -> None:
    trainer.model = str(model_folder)
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] == 2.0
    assert (trainer.state.global_step, trainer.num_generations, trainer.args.num_generations) == (3, 2, 2)
    assert trainer.accelerator.is_main_process
    assert trainer.is_world_process_zero()
    trainer.log_metrics("train", {"train_loss": 2.0, "samples": 3})
    assert trainer.state.log_history[-2] == {
        "train_loss": 2.0,
        "train_samples": 3,
        "epoch": trainer.state.epoch,
        "step": 3,
    }
    trainer.save_state()
    assert (trainer.run_dir / "trainer_state.json").is_file()
    with pytest.raises(AttributeError, match=r"has no attribute 'lr_scheduler'.*their own processes"):
        _ = trainer.lr_scheduler


def test_the_folder_of_the_newest_checkpoint_resumes(
    supervised: list[tuple[RunConfig, bool]], model_folder: Path
) -> None:
    trainer.model = str(model_folder)
    save_checkpoints(trainer.run_dir, 4, 6)
    trainer.train(resume_from_checkpoint=trainer.run_dir / "checkpoints" / "step-000006")
    assert supervised[-1][1]
    with pytest.raises(ConfigError, match=r"the newest is .*step-000006; write True"):
        trainer.train(resume_from_checkpoint=str(trainer.run_dir / "checkpoints" / "step-000004"))


def test_a_card_names_the_data_set_and_the_tags(tmp_path: Path) -> None:
    writing = GRPOTrainer("org/model", accuracy, GRPOConfig(str(tmp_path / "sums")), ROWS)
    save_checkpoints(writing.run_dir, 3)
    (writing.run_dir / "checkpoints" / "step-000003" / "model" / "README.md").write_text(
        "---\ntags: [slipstream]\n---\n# sums"
    )
    writing.create_model_card(model_name="Sums", dataset_name="org/sums", tags="tools")
    card = (writing.run_dir / "README.md").read_text()
    assert "org/sums" in card
    assert "- slipstream\n- tools" in card
    assert "model_name: Sums" in card


IN_A_FUNCTION = """
import sys
from slipstream.trl import GRPOConfig, GRPOTrainer
def main(text):
    def accuracy(completions, **columns):
        return [0.0] * len(completions)
    for number in (1, 2):
        trainer = GRPOTrainer("org/model", accuracy, GRPOConfig(f"out-{number}"), [{"prompt": f"{text} {number}"}])
        trainer.train()
        print("result")
    trainer.rollouts([f"{text} 3"])
    trainer.evaluate([{"prompt": f"{text} 4"}])
if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_a_trainer_in_a_function_is_found_by_its_start(
    start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "main.py"
    file.write_text(IN_A_FUNCTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_SCRIPT_ARGUMENTS", '["hello"]')
    arguments, main = sys.argv, sys.modules["__main__"]
    task = load_task(TaskSection(path=f"{file}:__start_{start}__"))
    assert [row["prompt"] for row in task.dataset] == [f"hello {start}"]
    assert capsys.readouterr().out == ""
    assert (sys.argv, sys.modules["__main__"]) == (arguments, main)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] == []


def test_a_logger_that_a_script_made_writes_after_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "main.py"
    logs = "import logging, sys\nprint('shown by the script')\nhandler = logging.StreamHandler(sys.stdout)\n"
    file.write_text(logs + IN_A_FUNCTION.replace("[0.0]", 'handler.stream.write("later\\n") and [0.0]'))
    monkeypatch.setenv("SLIPSTREAM_SCRIPT_ARGUMENTS", '["hello"]')
    task = load_task(TaskSection(path=f"{file}:__start_1__"))
    task.rewards[0](["a"])
    assert capsys.readouterr().out == "later\n"


def test_a_script_without_that_start_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "main.py"
    file.write_text("pass")
    with pytest.raises(ConfigError, match=r"main.py defines no '__start_1__'"):
        load_task(TaskSection(path=f"{file}:__start_1__"))


@pytest.mark.parametrize(
    "head",
    [
        pytest.param("def main():", id="in a function"),
        pytest.param("if __name__ == '__main__':", id="a global of the script alone", marks=pytest.mark.wide),
    ],
)
def test_a_trainer_that_an_import_does_not_make_trains(head: str, script: Script) -> None:
    """With the real supervisor, and the real check of the task; the rest is a stand-in."""
    stand_in(script, "echo '{\"steps\": 5}' >runs/mine/summary.json; exit 0")
    made = f"GRPOConfig('runs/mine', max_steps=5, slipstream=dict({sections()[len('model=MODEL, ') :]}))"
    script.write(
        PATCHED
        + f"{head}\n"
        + "    import sys\n    print('read once', file=sys.stderr)\n"
        + f"    own = GRPOTrainer(MODEL['path'], accuracy, {made}, [{{'prompt': 'Multiply 2 by 3.'}}])\n"
        + "    print('trained', own.train().global_step)\n"
        + ("if __name__ == '__main__':\n    main()\n" if "def" in head else ""),
        HEAD,
    )
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("read once") == 1
    assert done.stdout.splitlines()[-1] == "trained 5"
    assert f'path = "{script.path}:__start_1__"' in (script.folder / "runs" / "mine" / "run.toml").read_text()


def test_rollouts_and_evaluations_are_runs_that_train_nothing(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path
) -> None:
    """What workers would play is played here by hand."""
    asked: list[RunConfig] = []

    def supervise(config: RunConfig, resume: bool) -> None:
        asked.append(config)
        task = playing.task
        config.run_dir.mkdir(parents=True)
        if config.run.name.startswith("rollouts"):
            for row in (*task.dataset, *task.eval_dataset):
                task.rewards[0](completions=["a", "b"], row=[row["row"]] * 2)  # type: ignore[operator]
        else:
            assert task.eval_dataset == ROWS
            line = {"step": 0, "reward": 0.25, "seconds": 1.0}
            (config.run_dir / "evaluations.jsonl").write_text(json.dumps(line) + "\n")

    monkeypatch.setattr(script_module, "supervise", supervise)
    monkeypatch.setattr("slipstream.trl.trainer.place_of", lambda *_: f"{__file__}:trainer")
    playing = GRPOTrainer(
        str(model_folder), accuracy, GRPOConfig(str(tmp_path / "mine"), learning_rate=1.0), [{"prompt": "other"}]
    )
    assert playing.evaluate(ROWS, metric_key_prefix="test") == {"test_reward": 0.25, "test_runtime": 1.0}
    assert playing.state.log_history[-1]["test_reward"] == 0.25
    assert playing.rollouts(["one", "two"], num_generations=2) == [["a", "b"], ["a", "b"]]
    assert [config.run_dir.parent for config in asked] == [tmp_path / "mine" / "evaluations"] * 2
    assert all(config.eval.at_start and config.learner.steps == 1 for config in asked)
    assert [config.eval.group_size for config in asked] == [8, 2]
    assert list(playing.task.dataset) == [{"prompt": "other"}]
    with pytest.raises(ConfigError, match="there is no eval_dataset; give one here"):
        playing.evaluate()


def test_the_callback_that_ends_a_run_at_once_is_one_of_transformers() -> None:
    from slipstream.trl import evaluation

    (found,) = callbacks.load([f"{evaluation.__file__}:AT_ONCE"])
    control = SimpleNamespace(should_training_stop=False)
    found.on_train_begin(None, None, control)
    found.on_step_end(None, None, control)
    assert control.should_training_stop


def test_a_notebook_s_cells_are_a_script_up_to_its_training(tmp_path: Path) -> None:
    cells = ["%pip install x\nimport os", "%%bash\necho", "get_ipython().system('ls')\nx = os.no_such", "not python"]
    last = "value = 3\n!ls\n%matplotlib inline\nsaid = os.sep * value"
    names: dict[str, Any] = {}
    exec(notebook.script([*cells, last]), names)
    assert names["said"] == os.sep * 3
    with pytest.raises(AttributeError, match="no_such"):
        exec(notebook.script(["import os", "os.no_such"]), {})
    ran = tmp_path / "ran"
    session = f"""
import sys
from pathlib import Path
from slipstream.trl import notebook
In = ["", "import sys", "open({str(ran)!r}, 'w').write('yes')", "import os; sys.exit(int(os.environ['FAIL']))"]
assert notebook.is_one()
try:
    notebook.run(Path({str(tmp_path / "mine")!r}), 1)
except RuntimeError as failure:
    print("failed", failure.code)
else:
    print("done")
"""
    for fail in "04":
        done = subprocess.run(
            [sys.executable, "-c", session],
            env={**os.environ, "FAIL": fail},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.splitlines()[-1] == ("failed 4" if fail == "4" else "done"), done.stderr
    assert ran.read_text() == "yes"
    journals(tmp_path / "mine", 2)
    drawn = notebook.table(read_state(tmp_path / "mine"))
    assert drawn.count("<tr>") == 2
    assert "<td>0.200000</td>" in drawn


def test_a_notebook_s_training_fails_with_its_own_error_and_draws_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(notebook, "_draw", lambda state, _: drawn.append(state.global_step))
    raises = (
        "from slipstream.protocol.config import ConfigError\nprint('a bar')\nraise ConfigError('a = 1: no;\\nwrite 2')"
    )
    monkeypatch.setattr(sys.modules["__main__"], "In", [raises], raising=False)
    journals(tmp_path / "mine", 2)
    with pytest.raises(ConfigError, match=r"^a = 1: no;\nwrite 2$"):
        notebook.run(tmp_path / "mine", 1)
    assert drawn == []
    with pytest.raises(ConfigError):
        notebook.run(tmp_path / "other", 1)
    assert drawn == [0]


def test_a_model_as_a_reward_is_its_logit(tmp_path: Path) -> None:
    """Of prompt and completion, each by itself: padding changes nothing."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from tests.kit.model import SIZES

    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(TOKENIZER)}
    model = Qwen3ForSequenceClassification(Qwen3Config(**sizes, head_dim=8, num_labels=1)).eval()
    model.save_pretrained(tmp_path / "judge")
    TOKENIZER.save_pretrained(tmp_path / "judge")
    judged = GRPOTrainer("org/model", [str(tmp_path / "judge"), accuracy], None, ROWS)
    reward, function = judged.task.rewards
    assert (reward.__name__, function) == ("judge", accuracy)  # type: ignore[union-attr]
    texts = ["1 + 1 = 2", "1 + 1 = a much longer answer"]
    found = reward(prompts=["1 + 1"] * 2, completions=[text[5:] for text in texts])  # type: ignore[operator]
    ids = [torch.tensor([TOKENIZER.encode(text, add_special_tokens=False)]) for text in texts]
    model.config.pad_token_id = TOKENIZER.pad_token_id
    with torch.no_grad():
        assert found == pytest.approx([float(model(one).logits) for one in ids], abs=1e-5)
    turns = {"prompts": [[{"role": "user", "content": "a"}]], "completions": [[{"role": "assistant", "content": "b"}]]}
    text = TOKENIZER.apply_chat_template([*turns["prompts"][0], *turns["completions"][0]], tokenize=False)
    with torch.no_grad():
        (said,) = reward(**turns)  # type: ignore[operator]
        whole = torch.tensor([TOKENIZER.encode(text, add_special_tokens=False)])
        assert said == pytest.approx(float(model(whole).logits), abs=1e-5)


def test_a_reward_model_that_is_not_there_is_refused_before_the_start(
    supervised: list[tuple[RunConfig, bool]], monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    made = GRPOTrainer(str(model_folder), "./no_such_model", GRPOConfig(), ROWS)
    monkeypatch.setattr(sys.modules[__name__], "trainer", made)
    with pytest.raises(
        ConfigError, match=r"GRPOTrainer\(reward_funcs='./no_such_model'\): not a model .*give the folder"
    ):
        made.train()
    assert not supervised


def test_a_reward_with_a_server_is_left_to_it_and_classes_must_match() -> None:
    served = GRPOConfig(slipstream={"task": {"reward_servers": {"org/judge": "http://j"}}})
    assert GRPOTrainer("m/m", "org/judge", served, ROWS).task.rewards == ["org/judge"]
    with pytest.raises(ConfigError, match=r"number of reward processing classes, 2, must match .* functions, 1"):
        GRPOTrainer("m/m", "org/judge", None, ROWS, reward_processing_classes=[None, None])
    with pytest.raises(ConfigError, match=r"number of reward processing classes, 1, must match .* functions, 2"):
        GRPOTrainer("m/m", ["org/judge", accuracy], None, ROWS, reward_processing_classes=TOKENIZER)
    one = GRPOTrainer("m/m", ["org/judge", accuracy], None, ROWS, reward_processing_classes=[TOKENIZER, None])
    assert one.reward_processing_classes == [TOKENIZER, None]
    assert one.reward_funcs[1] is accuracy


def test_an_epoch_is_its_rows_in_steps() -> None:
    config = GRPOConfig(
        per_device_train_batch_size=16, eval_strategy="epoch", save_strategy="epoch", num_generations_eval=1
    )
    made = translate(config, "org/model", None, rows=41).sections
    assert made["eval"] == {"every": 21, "at_start": False, "group_size": 1}
    assert made["learner"]["checkpoint_every"] == 21
    GRPOTrainer("org/model", accuracy, config, ROWS, eval_dataset=ROWS)
    with pytest.raises(ConfigError, match="counted when it is read"):
        GRPOTrainer("org/model", accuracy, config, lambda: iter(ROWS), eval_dataset=ROWS)


def test_several_evaluation_data_sets_are_one_beside_the_training_and_each_by_itself_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets = {"easy": ROWS, "hard": [{"prompt": "hard"}]}
    several = GRPOTrainer("org/model", accuracy, None, ROWS, eval_dataset=sets)
    assert several.task.eval_dataset is None  # nothing during the training reads it
    several = GRPOTrainer("org/model", accuracy, GRPOConfig(eval_strategy="steps"), ROWS, eval_dataset=sets)
    assert several.task.eval_dataset == [*ROWS, {"prompt": "hard"}]
    streams = {"easy": SimpleNamespace(__iter__=None), **sets}
    assert GRPOTrainer("m/m", accuracy, None, ROWS, eval_dataset=streams).eval_dataset is streams
    asked = []
    monkeypatch.setattr(several, "_play", lambda task, *_: asked.append(task.eval_dataset))
    assert several.evaluate() == {}
    assert asked == [ROWS, [{"prompt": "hard"}]]


def test_what_a_template_does_not_read_is_left_out(
    supervised: list[tuple[RunConfig, bool]],
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"enable_thinking": False, "unheard_of": 1}
    trainer.model = str(model_folder)
    monkeypatch.setitem(trainer.args.given, "chat_template_kwargs", given)
    read = {name for name in given if name in trainer.processing_class.get_chat_template()}
    trainer.train()
    assert {*supervised[0][0].chat.chat_template_kwargs} == read
    assert "the template reads no" in capsys.readouterr().err


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(seconds)
    yield
    signal.alarm(0)


def asks_with_an_alarm(text: str) -> str:
    """Ask.

    Args:
        text: A question.
    """
    with within(5):
        return text


class Asked:
    """The least that is an environment."""

    def reset(self, **_: Any) -> None: ...


def asks(text: str) -> str:
    """Ask without an alarm.

    Args:
        text: A question.
    """
    return text


@pytest.mark.parametrize(
    ("arguments", "given", "worker"),
    [
        ({"tools": [asks_with_an_alarm]}, {}, ("process", 4)),
        ({"tools": [asks_with_an_alarm]}, {"user_threads": 9}, ("process", 9)),
        ({"tools": [asks_with_an_alarm]}, {"tool_isolation": "thread"}, ("thread", 64)),
        ({"tools": [asks]}, {}, ("thread", 64)),
        ({"tools": [asks_with_an_alarm], "environment_factory": Asked}, {}, ("thread", 64)),
    ],
)
def test_a_tool_that_sets_an_alarm_has_a_main_thread(
    arguments: dict[str, Any],
    given: dict[str, Any],
    worker: tuple[str, int],
    supervised: list[tuple[RunConfig, bool]],
    monkeypatch: pytest.MonkeyPatch,
    model_folder: Path,
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Ask."}]}]
    made = GRPOTrainer(str(model_folder), accuracy, GRPOConfig(slipstream={"worker": given}), rows, **arguments)
    monkeypatch.setattr(sys.modules[__name__], "trainer", made)
    made.train()
    ((config, _),) = supervised
    assert (config.worker.tool_isolation, config.worker.user_threads) == worker


def test_fp16_is_the_servers() -> None:
    assert sections_of(GRPOConfig(fp16=True))["model"]["dtype"] == "float16"
    assert not [note for note in translate(GRPOConfig(fp16=True), "m/m", None).notes if "bf16 (" in note]


def test_trl_s_parser_gives_our_configs(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="its parser is adapted")
    from slipstream.trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
    from slipstream.trl.rewards import think_format_reward

    yaml = tmp_path / "recipe.yaml"
    yaml.write_text("num_generations: 4\nlearning_rate: 1.0e-5\n")
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    command = (
        f"--config {yaml} --output_dir out --max_steps 3 --bf16 true --dataset_name org/sums --use_peft --lora_r 4"
    )
    arguments, config, model = parser.parse_args_and_config(command.split())
    assert isinstance(config, GRPOConfig)
    assert config.given == {
        "output_dir": "out", "max_steps": 3, "bf16": True, "num_generations": 4, "learning_rate": 1e-5
    }  # fmt: skip
    assert (arguments.dataset_name, get_peft_config(model).r) == ("org/sums", 4)
    assert think_format_reward([[{"content": "no"}]]) == [0.0]


def test_steps_of_several_updates_are_as_many_fewer() -> None:
    """TRL counts each update as a step."""
    config = GRPOConfig(
        num_iterations=2,
        max_steps=11,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=3,
        warmup_steps=0.5,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=7,
    )
    made = translate(config, "org/model", None)
    learner = made.sections["learner"]
    names = ("num_iterations", "steps", "checkpoint_every", "warmup_steps", "reference_sync_steps")
    assert [learner[name] for name in names] == [2, 6, 2, 3, 4]
    assert made.sections["eval"]["every"] == 2
    assert any("num_iterations=2: a step here makes that many updates" in note for note in made.notes)
    check_fields(config, made.sections)
    assert "num_iterations" not in translate(RLOOConfig(), "org/model", None).sections["learner"]


def test_cispo_with_trl_s_default_bound_is_what_trl_makes_of_it() -> None:
    made = translate(GRPOConfig(loss_type="cispo"), "org/model", None)
    assert made.sections["learner"]["clip_high"] == pytest.approx(-0.8)
    assert any("counts 0.2" in note for note in made.notes)
    check_fields(GRPOConfig(loss_type="cispo"), made.sections)
    with pytest.raises(ConfigError, match=r"clip_high = -0\.5: must be above 0"):
        check_fields(GRPOConfig(epsilon_high=-0.5), translate(GRPOConfig(epsilon_high=-0.5), "m/m", None).sections)


def test_a_structured_output_is_learnt_as_it_was_sampled() -> None:
    config = GRPOConfig(vllm_structured_outputs_regex="[0-9]+", generation_kwargs={"min_tokens": 2})
    rollout = translate(config, "org/model", None).sections["rollout"]
    assert rollout["generation_kwargs"] == {"min_tokens": 2, "structured_outputs": {"regex": "[0-9]+"}}
    assert rollout["top_k"] == 64
    check_fields(config, translate(config, "org/model", None).sections)


def test_an_environment_without_a_data_set_needs_max_steps() -> None:
    with pytest.raises(ConfigError, match=r"GRPOTrainer: without a `train_dataset`.* max_steps=100"):
        GRPOTrainer("org/model", args=GRPOConfig(), environment_factory=Model)


def test_a_ratio_of_sequences_with_a_sum_over_tokens_is_told() -> None:
    def notes(loss: str) -> list[str]:
        config = GRPOConfig(importance_sampling_level="sequence", loss_type=loss)
        return [note for note in translate(config, "m/m", None).notes if "each sequence counts by its length" in note]

    assert [len(notes(loss)) for loss in ("grpo", "dapo", "dr_grpo")] == [0, 1, 1]
