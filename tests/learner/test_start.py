"""What a learner declares to the queue is what its workers' files give."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen3Config

from slipstream.learner import run, start
from slipstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from slipstream.protocol.config import ConfigError, LearnerSection, RunConfig, fingerprint
from slipstream.protocol.messages import LearnerProcess, RunPosition
from slipstream.rollout_worker.chat.build import build_chat_format
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, save_model_folder


@pytest.mark.parametrize("text", [CHAT_TEMPLATE, CHAT_TEMPLATE + "{# mine #}"], ids=["the tokenizer's own", "another"])
def test_i9_a_template_file_is_the_same_chat_format_on_both_ends(tmp_path: Path, text: str) -> None:
    """The worker puts the file into its tokenizer, the learner has no use for it."""
    model, file = save_model_folder(tmp_path / "model", CHAT_TEMPLATE), tmp_path / "file.jinja"
    file.write_text(text)
    here = config(WORKER, model={"path": str(model)}, chat={"template": str(file)})
    learners = start.session(here, None, False, vocabulary=64).fingerprint
    assert learners is not None
    workers = fingerprint.of(here, build_chat_format(here, []).tokenizer)
    assert fingerprint.difference(learners, workers) is None
    file.write_text(text + " ")
    other = fingerprint.of(here, build_chat_format(here, []).tokenizer)
    assert "the chat format" in str(fingerprint.difference(learners, other))


class Started(Exception):
    pass


@pytest.mark.parametrize(
    ("on_gpu", "unit", "named", "given", "taken"),
    [
        (True, None, "bfloat16", None, "bfloat16"),
        (True, None, None, None, "float32"),
        (True, None, "bfloat16", "float32", "float32"),
        (False, None, "bfloat16", None, "float32"),
        (False, "AMX", "bfloat16", None, "bfloat16"),
        (False, "AMX", "float16", None, "float32"),
    ],
)
def test_a_learner_that_accelerate_starts_takes_the_type_that_servers_take_by_themselves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_gpu: bool,
    unit: str | None,
    named: str | None,
    given: str | None,
    taken: str,
) -> None:
    """`slipstream` decides for the processes that it starts, and `accelerate launch` starts others."""
    Qwen3Config(dtype=named).save_pretrained(tmp_path)

    def starting_point(config: RunConfig, *_: object) -> None:
        raise Started(config.model.dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr("slipstream.protocol.config.machine.bfloat16_unit", lambda: unit)
    monkeypatch.setattr(start, "starting_point", starting_point)
    model = {"path": str(tmp_path), **({"dtype": given} if given else {})}
    with pytest.raises(Started, match=taken):
        run.run(config(model=model))


@pytest.mark.parametrize(
    ("host", "seen_s_ago", "alive"),
    [
        ("", 300.0, True),  # it loads its model, or is in a long step
        ("", None, True),  # the queue was started again
        ("a dead process", 1.0, False),  # killed a second ago
        ("another process of its number", 1.0, False),
        ("this process", 1.0, False),
        ("elsewhere", 31.0, True),
        ("elsewhere", 50.0, False),
        ("elsewhere", None, False),
    ],
)
def test_a_resume_beside_a_learner_that_lives_is_refused_with_its_host_and_process_id(
    host: str, seen_s_ago: float | None, alive: bool
) -> None:
    here, beside = socket.gethostname(), subprocess.Popen(["sleep", "60"])
    try:
        pid, started = beside.pid, psutil.Process(beside.pid).create_time()
        if host == "this process":
            pid = os.getpid()
        elif host == "a dead process":
            beside.kill()
            beside.wait()
        elif host == "another process of its number":
            started -= 100
        other = LearnerProcess("far-away" if host == "elsewhere" else here, pid, started, seen_s_ago)
        position = RunPosition(3, 3, 9, 1, None, None, False, learner=other)
        if alive:
            with pytest.raises(ConfigError, match=rf"process {pid} on {other.host}.*--take-over"):
                start.check_alone(position, take_over=False)
        else:
            start.check_alone(position, take_over=False)
        start.check_alone(position, take_over=True)
    finally:
        beside.kill()
        beside.wait()


def test_the_algorithm_is_named_with_what_is_set_beside_it() -> None:
    assert start.algorithm(LearnerSection(algorithm="rloo", clip_low=0.2)) == "algorithm rloo"
    told = start.algorithm(LearnerSection(algorithm="rloo", advantage="grpo", entropy_coef=0.01))
    assert told == 'algorithm rloo, but with advantage = "grpo", entropy_coef = 0.01'


@pytest.mark.parametrize(
    ("command", "argument", "says"),
    [
        ("slipstream up run.toml", None, "slipstream up run.toml --resume"),
        ("python mine.py", "resume=True", "python mine.py, with resume=True given to train()"),
        (
            "python t.py",
            "resume_from_checkpoint=True",
            "python t.py, with resume_from_checkpoint=True given to train()",
        ),
    ],
)
def test_how_to_go_on_is_said_in_the_words_of_who_started_it(
    monkeypatch: pytest.MonkeyPatch, command: str, argument: str | None, says: str
) -> None:
    monkeypatch.setenv(start.COMMAND_VARIABLE, command)
    monkeypatch.delenv(start.RESUME_VARIABLE, raising=False)
    if argument:
        monkeypatch.setenv(start.RESUME_VARIABLE, argument)
    assert start.resume_command() == says


@pytest.mark.parametrize(
    "command",
    [
        "slipstream up run.toml",
        "slipstream up run.toml --resume --learner.learning_rate 0.5",
        "slipstream up run.toml --learner.learning_rate=0.5 --resume",
    ],
)
def test_a_resume_with_another_learning_rate_names_it_once(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv(start.COMMAND_VARIABLE, command)
    assert start.resume_command(0.05) == "slipstream up run.toml --resume --learner.learning_rate 0.05"


@pytest.mark.parametrize(
    ("before", "now", "anew"),
    [("adamw_torch_fused", "muon", True), ("adamw_torch_fused", "adamw_torch", False), (None, "adamw_torch", False)],
)
def test_an_optimiser_that_starts_anew_on_a_resume_is_named(
    tmp_path: Path, before: str | None, now: str, anew: bool
) -> None:
    """`before`: None in checkpoints that were made when there was but one."""
    here = config(learner={"optim": now, "learning_rate": 1e-3})
    settings = {**start.settings(here), "learner.optim": before, "learner.learning_rate": "0.01"}
    held = {name: value for name, value in settings.items() if value is not None}
    made = Checkpoint(tmp_path, CheckpointInfo(2, 2, held))
    said = "\n".join(start.introduction(here, made, RunPosition(2, 2, 4, 1, None, None, False)))
    assert "learner.learning_rate = 0.001 (was 0.01)" in said
    assert (f"learner.optim = {now} can make nothing of what {before} kept: it starts again" in said) is anew


@pytest.mark.parametrize(("steps", "left"), [(9, False), (10, False), (11, True)])
def test_a_resume_with_no_step_left_is_told(tmp_path: Path, steps: int, left: bool) -> None:
    """A run that was stopped after its step 10, perhaps under more steps than it is given now."""
    here = config(learner={"steps": steps})
    made = Checkpoint(tmp_path, CheckpointInfo(10, 10, start.settings(here)))
    said = "\n".join(start.introduction(here, made, RunPosition(10, 10, 4, 1, None, None, False)))
    assert f"resuming from step 10 of {steps}: " in said
    assert ("raise learner.steps to train on" not in said) is left


@pytest.mark.parametrize(("then", "now", "anew"), [({}, {"amsgrad": True}, True), ({"amsgrad": True}, {}, False)])
def test_arguments_with_which_it_starts_anew_are_named(
    tmp_path: Path, then: dict[str, bool], now: dict[str, bool], anew: bool
) -> None:
    before, here = (config(learner={"optim_args": args}) for args in (then, now))
    made = Checkpoint(tmp_path, CheckpointInfo(2, 2, start.settings(before)))
    said = "\n".join(start.introduction(here, made, RunPosition(2, 2, 4, 1, None, None, False)))
    told = (
        "learner.optim = adamw_torch_fused with learner.optim_args = {'amsgrad': True} can make nothing of what "
        "adamw_torch_fused kept: it starts again"
    )
    assert (told in said) is anew


@pytest.mark.parametrize("same", [True, False])
def test_a_resume_names_demonstrations_that_are_others(tmp_path: Path, same: bool) -> None:
    """Whatever the file is called: the order of the conversations, and which are held out, follow from the data."""
    before, now = tmp_path / "before.jsonl", tmp_path / "now.jsonl"
    before.write_text("one")
    now.write_text("one" if same else "two")
    then, here = (config(demonstrations={"path": str(path)}) for path in (before, now))
    told = start.changed(here, CheckpointInfo(2, 2, start.settings(then)))
    assert any(line.startswith("demonstrations.data = ") for line in told) is not same
    assert "demonstrations.data" not in start.settings(config(demonstrations={"path": str(tmp_path)}))
