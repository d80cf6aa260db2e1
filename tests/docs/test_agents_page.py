"""docs/agents.md: its agent runs as it is written, and its table names every parameter."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream import Endpoint
from slipstream.protocol.config import TaskSection
from slipstream.protocol.messages import Group
from slipstream.rollout_worker.agent.api import request
from slipstream.rollout_worker.task.task import Task, load_task
from slipstream.rollout_worker.user_code import async_code
from slipstream.rollout_worker.user_code.async_code import EventLoop
from tests.kit import WORKER, config
from tests.kit.agent import agent_task
from tests.kit.fake_openai import FakeOpenAI
from tests.kit.fake_vllm.policies import scripted
from tests.kit.stand_in_queue import StandInQueue, tickets_for
from tests.kit.worker import TOKENIZER, fake, roll, until

pytest.importorskip("openai")

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")


@pytest.fixture
def of_the_page(tmp_path: Path) -> Task:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "task.py").write_text(code, encoding="utf-8")
    return load_task(TaskSection(path=f"{tmp_path}/task.py:task"))


async def test_the_agent_of_the_page_runs(of_the_page: Task) -> None:
    run = await roll(of_the_page, fake())
    assert run.queue.failures == {}
    assert [(rollout.reward, rollout.metrics["calls"]) for rollout in run.rollouts] == [(1.0, 1.0)] * 2


async def test_the_roles_of_the_page_are_trained_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "agents={" in code)
    judge = FakeOpenAI(lambda messages: "well done")
    async with judge.serving() as base_url:
        monkeypatch.setenv("JUDGE_KEY", "secret")
        made: dict[str, Any] = {}
        exec(code.replace("http://127.0.0.1:8300/v1", base_url), made)
        says = scripted(TOKENIZER, lambda text, index: "yes" if "You check" in text else "7")
        run = await roll(made["task"], fake(says))
    assert run.queue.failures == {}
    assert sorted((rollout.role, rollout.extra["remark"]) for rollout in run.rollouts) == [
        *[("critic", "well done")] * 2,
        *[("solver", "well done")] * 2,
    ]
    assert {request.authorization for request in judge.requests} == {"Bearer secret"}


async def test_the_agent_of_the_page_outlives_an_event_loop_that_is_blocked(
    of_the_page: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client failed in each episode on another loop."""
    as_written, moved = of_the_page.agent, threading.Event()
    assert as_written is not None
    homes: list[asyncio.AbstractEventLoop] = []

    async def agent(endpoint: Endpoint, **columns: Any) -> Any:
        homes.append(asyncio.get_running_loop())
        if homes[-1] is not homes[0]:
            moved.set()
        return await as_written(endpoint, **columns)

    loops: set[EventLoop] = set()
    monkeypatch.setattr(async_code, "MAX_PATIENCE", async_code.MAX_UNANSWERED)
    ping = EventLoop.ping
    monkeypatch.setattr(EventLoop, "ping", lambda loop, counts: (loops.add(loop), ping(loop, counts)))
    queue = StandInQueue(tickets_for(4, 2))
    original = queue.submit

    async def submit(group: Group) -> Any:
        if not moved.is_set():
            homes[0].call_soon_threadsafe(moved.wait)
            await until(lambda: any(loop.blocked for loop in loops))
        return await original(group)

    queue.submit = submit  # type: ignore[method-assign]
    one_group = config(WORKER, worker={"episodes": 2})
    run = await roll(
        agent_task(agent, dataset=of_the_page.dataset), fake(), config=one_group, queue=queue, ping_s=0.005
    )
    assert run.queue.failures == {}
    assert len(set(homes)) == 2
    assert [rollout.reward for rollout in run.rollouts] == [1.0] * 8


def test_the_table_names_every_parameter() -> None:
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert not {
        *request.READ_PARAMETERS,
        *request.HARMLESS_PARAMETERS,
        *request.REFUSED_PARAMETERS,
        *request.RUN_PARAMETERS,
    } - {
        *named,
        "stream_options",
    }
