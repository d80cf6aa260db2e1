"""docs/agents.md: its agent runs as it is written, and its table names every parameter."""

import re
from pathlib import Path

import pytest

from protocol.config import TaskSection
from rollout_worker.agent import parameters
from rollout_worker.task import load_task
from tests.kit.worker import fake, roll

pytest.importorskip("openai")

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")


async def test_the_agent_of_the_page_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "task.py").write_text(code, encoding="utf-8")
    run = await roll(load_task(TaskSection(path=f"{tmp_path}/task.py:task")), fake())
    assert run.queue.failures == {}
    assert [(rollout.reward, rollout.metrics["calls"]) for rollout in run.rollouts] == [(1.0, 1.0)] * 2


def test_the_table_names_every_parameter() -> None:
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert not {*parameters.READ, *parameters.HARMLESS, *parameters.REFUSED, *parameters.OF_THE_RUN} - {
        *named,
        "stream_options",
    }
