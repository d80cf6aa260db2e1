"""`docs/your_task.md` shows the files that `slipstream init` writes, as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from slipstream.deploy.commands import setup
from slipstream.protocol.config import TaskSection
from slipstream.rollout_worker.task.task import load_task
from tests import kit
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll

PAGE = (Path(__file__).parents[2] / "docs" / "your_task.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number]


def test_the_page_shows_what_init_writes(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    setup.write_task_files(folder, "Qwen/Qwen3-0.6B")
    assert block("python") == (folder / "task.py").read_text(encoding="utf-8")
    assert block("toml") == (folder / "run.toml").read_text(encoding="utf-8")
    first = (folder / "data.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(block("json")) == json.loads(first)


def test_the_commands_of_the_page_are_understood() -> None:
    from typer.testing import CliRunner

    from slipstream.deploy.cli import app

    commands = {line.split()[1] for line in PAGE.splitlines() if line.startswith("slipstream ")}
    assert commands == {"init", "up", "status", "rollouts"}
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


async def test_the_pages_environment_is_played(tmp_path: Path) -> None:
    """By a policy that first guesses nothing, and then halves what is left."""
    (tmp_path / "guessing.py").write_text(block("python", 1), encoding="utf-8")
    task = load_task(TaskSection(path=f"{tmp_path}/guessing.py:task"))

    def reply(text: str, index: int) -> str:
        low, high = 1, int(re.findall(r"between 1 and (\d+)", text)[-1])
        if "guess on" not in text:
            return "I do not know."
        guesses = re.findall(r'"number": (\d+)', text.rpartition("</tools>")[2])
        for number, said in zip(guesses, re.findall(r"<tool_response>\n(\w+)", text), strict=True):
            if said == "right":
                return "Found."
            low, high = (int(number) + 1, high) if said == "higher" else (low, int(number) - 1)
        return f'<tool_call>{{"name": "guess", "arguments": {{"number": {(low + high) // 2}}}}}</tool_call>'

    roomy = kit.config(kit.WORKER, vllm={"max_model_len": 4000})
    run = await roll(task, fake(scripted(TOKENIZER, reply)), tickets=3, config=roomy)
    assert run.queue.failures == {}
    for rollout in run.rollouts:
        assert rollout.reward == 1 / rollout.tool_calls
        assert rollout.turns == rollout.tool_calls + 2
