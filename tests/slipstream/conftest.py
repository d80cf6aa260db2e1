"""A script as a user writes it, with a folder for its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.conftest import model_folder

__all__ = ["Script", "model_folder", "script"]

SOURCE = """
import asyncio, json, sys, threading
from slipstream import ConfigError, RunFailed, Task, train

def accuracy(completions, **columns):
    return [0.0] * len(completions)

print("the script may print")
task = Task(dataset=[{"prompt": "Multiply 2 by 3."}], rewards=[accuracy])
"""


class Script:
    """Written by `write`: the head above, then the test's lines."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.path = folder / "my script.py"

    def write(self, tail: str, head: str = SOURCE) -> Path:
        self.path.write_text(f"{head}\nMODEL = {{'path': {str(self.model)!r}}}\n{tail}\n", encoding="utf-8")
        return self.path


@pytest.fixture
def script(tmp_path: Path, model_folder: Path) -> Script:
    folder = tmp_path / "a folder"
    folder.mkdir()
    return Script(folder, model_folder)
