"""`slipstream sft` as a person types it: from conversations to a model folder, or one line with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.deploy.cli import app
from slipstream.deploy.run.run_directory import LAUNCHER_LOCK
from slipstream.protocol.config.learning_rates import SUPERVISED_UNKNOWN, supervised_rate, usual_rates
from slipstream.rollout_queue.store.base import hold_lock_file
from tests.deploy.conftest import run_directory
from tests.deploy.typed import output
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.model import tiny_model

CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}],
}
ROW = {
    "messages": [
        {"role": "user", "content": "Multiply 2 by 3."},
        CALLING,
        {"role": "tool", "name": "multiply", "content": "6"},
        {"role": "assistant", "content": "The product is 6."},
    ]
}


def data_file(run_file: Path, *rows: object) -> Path:
    path = run_file.parent / "demos.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_a_file_of_conversations_becomes_a_model_folder_and_the_command_that_continues(
    run_file: Path, tmp_path: Path
) -> None:
    folder = save_model_folder(tmp_path / "trainable")
    tiny_model(vocab_size=384, max_position_embeddings=4096).save_pretrained(folder)
    given = ["--model.path", str(folder), "--demonstrations.epochs", "2", "--demonstrations.batch_size", "4"]
    data = data_file(run_file, *[ROW] * 10)
    code, said = output("sft", str(run_file), "--data", str(data), *given, "--demonstrations.eval_share", "0.2")
    assert code == 0, said
    sft_dir = run_directory(run_file).with_name("small-sft")
    model = sft_dir / "checkpoints" / "step-000004" / "model"
    assert (model / "model.safetensors").is_file()
    assert (model / "tokenizer.json").is_file()
    assert "10 conversations of" in said
    assert "held-out loss" in said
    assert "continue with: slipstream up" in said.replace("\n", " ")
    assert said.rstrip().endswith("step-000004/model'") or said.rstrip().endswith("step-000004/model")
    lines = [json.loads(line) for line in (sft_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[-1]["loss"] < lines[1]["loss"]


DIVIDING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "divide"}}]}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "it holds no conversation"),
        ([ROW, {"messages": []}], "row 2: it has no assistant's turn to learn"),
        ([{"messages": [ROW["messages"][0], DIVIDING]}], "row 1: message 1 calls 'divide'"),
    ],
)
def test_data_that_cannot_be_learnt_is_one_line_with_code_2(run_file: Path, rows: list[object], says: str) -> None:
    code, said = output("sft", str(run_file), "--data", str(data_file(run_file, *rows)))
    assert code == 2, said
    (message,) = [line for line in said.splitlines() if line != "a task file may print"]
    assert message.startswith("slipstream: demonstrations.path = ")
    assert says in message
    assert not run_directory(run_file).with_name("small-sft").exists()


def test_two_trainings_in_one_directory_are_refused(run_file: Path) -> None:
    with hold_lock_file(run_directory(run_file).with_name("small-sft") / LAUNCHER_LOCK):
        code, said = output("sft", str(run_file), "--data", str(data_file(run_file, ROW, ROW)))
    assert code == 2, said
    assert "small-sft is in use by another launcher" in said


def test_without_data_the_option_is_named(run_file: Path) -> None:
    code, said = output("sft", str(run_file))
    assert code == 2
    assert "demonstrations.path is not set" in said
    code, said = output("up", str(run_file), "--learner.demonstrations_coef", "0.1")
    assert code == 2
    assert "learner.demonstrations_coef = 0.1 needs conversations: name them with demonstrations.path" in said


def test_the_rate_follows_the_size_of_the_model() -> None:
    assert supervised_rate(135e6) == pytest.approx(5 * usual_rates(135e6).first)
    assert supervised_rate(135e6, adapter=True) == pytest.approx(50 * usual_rates(135e6).first)
    assert supervised_rate(None) == SUPERVISED_UNKNOWN
    assert {command.name or command.callback.__name__ for command in app.registered_commands} >= {"sft", "demos"}
