"""Commands of `docs/clusters.md` and `docs/machines.md` are ones that we take, and their settings are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from slipstream.deploy.cli import app
from slipstream.protocol.config import load

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("clusters.md", "machines.md")
RUN_FILE = '[model]\npath = "m"\n\n[task]\npath = "task.py:task"\n\n'


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pages ask for one first."""
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "0123456789abcdef0123456789abcdef")


def blocks(page: str, kind: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


def commands(page: str) -> list[list[str]]:
    """Return the words of each command of ours, up to a pipe."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line.startswith("slipstream ")]
    return [shlex.split(line.partition(" | ")[0], comments=True)[1:] for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_that_we_take(page: str, tmp_path: Path) -> None:
    found = commands(page)
    assert len(found) > 4
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE, encoding="utf-8")
    for words in found:
        command: Any = typer.main.get_command(app)
        rest = [str(run_file) if word == "run.toml" else word for word in words]
        while isinstance(getattr(command, "commands", None), dict) and rest[0] in command.commands:
            name, *rest = rest
            command = command.commands[name]
        if getattr(command, "commands", None):  # `slipstream queue run.toml` is `queue run`
            command = command.commands["run"]
        settings = command.make_context("slipstream", rest).args
        load(run_file, settings)


@pytest.mark.parametrize("page", PAGES)
def test_every_piece_of_a_run_file_is_valid(page: str, tmp_path: Path) -> None:
    found = blocks(page, "toml")
    assert len(found) > 1
    for block in found:
        run_file = tmp_path / "run.toml"
        run_file.write_text(RUN_FILE + block, encoding="utf-8")
        load(run_file)


def test_every_engine_has_its_section() -> None:
    from slipstream.deploy.commands.cluster import ENGINES

    text = (DOCS / "clusters.md").read_text(encoding="utf-8")
    for engine in ENGINES:
        assert f"| `{engine}` |" in text
        assert engine == "local" or re.search(rf"^## {engine}$", text, re.M | re.I)
