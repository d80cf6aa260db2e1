"""`docs/your_own_task.md` shows the files that `slipstream init` writes, as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from deploy import init

PAGE = (Path(__file__).parents[2] / "docs" / "your_own_task.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number]


def test_the_page_shows_what_init_writes(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    init.write(folder, "Qwen/Qwen3-0.6B")
    assert block("python") == (folder / "task.py").read_text(encoding="utf-8")
    assert block("toml") == (folder / "run.toml").read_text(encoding="utf-8")
    first = (folder / "data.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(block("json")) == json.loads(first)


def test_the_commands_of_the_page_are_understood() -> None:
    from typer.testing import CliRunner

    from deploy.cli import app

    commands = {line.split()[1] for line in PAGE.splitlines() if line.startswith("slipstream ")}
    assert commands == {"init", "up", "status", "rollouts"}
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
