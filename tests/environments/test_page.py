"""docs/environments.md: each snippet makes a task, with its library where it is installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from slipstream import environments
from slipstream.rollout_worker.task.task import Task
from tests.environments.stand_ins import nemo_gym_server
from tests.environments.test_contract import HERE, STAND_INS, Bench, harbor_program

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
SNIPPETS = {
    name.lower().replace(" ", "_"): code
    for name, code in re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
}
IN_CONTRACT = {"inspect": "inspect_ai"}


def test_each_adapter_has_a_snippet_and_a_row() -> None:
    lines = re.findall(r"^\| .+? \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(lines) == sorted(environments.__all__)
    assert [line for line in lines if not any(f"{line}(" in code for code in SNIPPETS.values())] == []


def test_the_sandbox_of_the_page_runs_programs() -> None:
    made: dict[str, Any] = {}
    exec(SNIPPETS["sandboxes"], made)
    assert made["python"]("print(sum(range(5)))") == "10"
    made["SANDBOX"].close()


# The task sets of verifiers have packages of their own.
@pytest.mark.parametrize("name", [name for name in SNIPPETS if name not in ("verifiers", "sandboxes")])
def test_its_snippet_makes_a_task(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if IN_CONTRACT.get(name, name) not in HERE:
        pytest.skip(f"{name} is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "example.jsonl").write_text(nemo_gym_server.line())
    (tmp_path / "terminal-bench" / "sums").mkdir(parents=True)
    (tmp_path / "terminal-bench" / "sums" / "task.toml").touch()
    shutil.copy(STAND_INS / "inspect_sums.py", tmp_path / "sums.py")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    harbor_program(Bench(tmp_path, None))  # type: ignore[arg-type]
    made: dict[str, object] = {}
    exec(SNIPPETS[name], made)
    assert isinstance(made["task"], Task)
    assert made["task"].rows.size is not None
