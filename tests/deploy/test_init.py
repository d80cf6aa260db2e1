"""`slipstream init`: what it writes is a task and a run file that work as they stand."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from slipstream.deploy import cli
from slipstream.deploy.commands import setup
from slipstream.protocol.config import ConfigError, load
from slipstream.rollout_worker import user_code
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.parsers.base import ToolCall
from slipstream.rollout_worker.data import columns
from slipstream.rollout_worker.task.reward_base import RewardBatch
from slipstream.rollout_worker.task.rewards import RewardFunctions
from slipstream.rollout_worker.task.task import Task, load_task
from slipstream.rollout_worker.tools.toolbox import ToolBox


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    setup.write_task_files(tmp_path / "my shop", str(model_folder))
    return tmp_path / "my shop"


@pytest.fixture
def task(folder: Path) -> Task:
    return load_task(load(folder / "run.toml").task)


def test_the_run_file_loads_and_its_model_can_talk_to_the_tools(folder: Path, task: Task, model_folder: Path) -> None:
    config = load(folder / "run.toml", needs=("task", "model"))
    assert (config.run.name, config.model.path) == ("my-shop", str(model_folder))
    assert "dtype" not in tomllib.loads((folder / "run.toml").read_text())["model"], "this machine chooses"
    assert config.worker.keep_messages
    assert config.chat.system_prompt is not None
    build_chat_format(config, ToolBox(task.tools).schemas)


def test_a_model_whose_template_knows_no_tools_gets_them_in_the_prompt(tmp_path: Path, model_folder: Path) -> None:
    """With limits for its prompts and turns in place of the model's whole context."""
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    own = shutil.copytree(model_folder, tmp_path / "model")  # other tests share the folder
    (own / "chat_template.jinja").write_text(plain, encoding="utf-8")
    setup.write_task_files(tmp_path / "shop", str(own))
    config = load(tmp_path / "shop" / "run.toml")
    assert (config.chat.tools, config.rollout.max_turn_tokens) == ("prompt", 128)
    build_chat_format(config, ToolBox(load_task(config.task).tools).schemas)


@pytest.mark.parametrize(("positions", "warned"), [(512, "no episode fits"), (1024, "cut off"), (8192, None)])
def test_a_model_whose_context_is_too_short_for_the_task_is_named(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], positions: int, warned: str | None
) -> None:
    own = shutil.copytree(model_folder, tmp_path / "model")
    sizes = f'{{"model_type": "qwen3", "max_position_embeddings": {positions}}}'
    in_a_part = f'{{"model_type": "qwen3_vl", "text_config": {sizes}}}'
    (own / "config.json").write_text(in_a_part if positions == 1024 else sizes)
    setup.write_task_files(tmp_path / "shop", str(own))
    err = capsys.readouterr().err
    assert ("warning" in err, warned is None or warned in err) == (warned is not None, True)
    assert load(tmp_path / "shop" / "run.toml").vllm.max_model_len <= positions


async def test_a_sync_and_an_async_tool_answer(task: Task) -> None:
    order = [ToolCall("price", {"item": "pen"}), ToolCall("price", {"item": "car"})]
    order += [ToolCall("total", {"quantities": [3, 2], "prices": [120, 250]})]
    found, missing, total = await ToolBox(task.tools).run(order)
    assert (found.content, total.content) == ("120", "860")
    assert missing.failed
    assert "there is no 'car'; the items are: pen" in missing.content


async def test_two_rewards_tell_a_right_answer_and_a_short_one(task: Task) -> None:
    row = task.row_for(0, seed=0).columns
    said = [str(row["answer"]), f"That is {row['answer']} cents.", "I do not know", ""]
    completions = [[{"role": "assistant", "content": text}] for text in said]
    others = {name: value for name, value in row.items() if name != "prompt"}
    functions = RewardFunctions(task.rewards, task.reward_weights)
    scores = await functions.score(RewardBatch(row["prompt"], completions, [[]] * 4, others))
    assert [score.components["correct"] for score in scores] == [1.0, 1.0, 0.0, 0.0]
    rewards = [score.reward or 0.0 for score in scores]
    assert rewards[0] > rewards[1] > 1.0 > rewards[2]


async def test_the_data_are_right(task: Task) -> None:
    """Each row is an order of items that have a price, and its answer their sum."""
    price, total = task.tools
    assert (task.rows.size or 0) >= 20
    assert columns.check_rows(task.rows).unusable == {}
    for _, row in task.rows.sample(1000):
        (user,) = row["prompt"]
        assert user["role"] == "user"
        order = re.findall(r"(\d+) ([a-z]+?)s?\b", user["content"])
        prices = [await user_code.UserCode().call(price, int, 5.0, item=item) for _, item in order]
        assert total([int(count) for count, _ in order], prices) == row["answer"]


@pytest.mark.parametrize("name", ["run.toml", "task.py", "data.jsonl"])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{name}: already there, and nothing is overwritten; give another folder"):
        setup.write_task_files(tmp_path, "gpt2")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_the_next_commands_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.sys, "argv", ["slipstream", "init", "shop"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    told, *commands = capsys.readouterr().out.splitlines()
    assert told == "wrote shop/run.toml, shop/task.py, shop/data.jsonl; next:"
    assert [line.split("#")[0].split() for line in commands] == [
        ["slipstream", "doctor", "shop/run.toml"],
        ["slipstream", "up", "shop/run.toml"],
        ["slipstream", "rollouts", "shop/run.toml"],
    ]
    config = load("shop/run.toml", needs=("task", "model"))
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert "dtype" not in config.model.model_fields_set  # the start chooses what this machine computes fast


@pytest.mark.parametrize(
    ("model", "says"),
    [("./no/such", "--model ./no/such: there is no such folder"), ("{empty}", "config.json cannot be read: .*No such")],
)
def test_a_model_that_is_not_there_is_told_and_nothing_is_written(tmp_path: Path, model: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        setup.write_task_files(tmp_path / "new", model.format(empty=tmp_path))
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/new: cannot be written: Not a directory"):
        setup.write_task_files(tmp_path / "file" / "new", "gpt2")
