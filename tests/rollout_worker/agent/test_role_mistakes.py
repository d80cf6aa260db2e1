"""Mistakes with several roles are named, though the group continues."""

from __future__ import annotations

import pytest

from slipstream.rollout_worker.task.agent import Endpoint
from tests.kit.agent import agent_task, client_of
from tests.kit.worker import fake, roll

ROLES = {"solver": "You solve.", "critic": None}


async def ask(endpoint: Endpoint, times: int = 1) -> int:
    """Ask so many times, each in its own conversation; returns the last status."""
    status = 0
    async with client_of(endpoint) as client:
        for number in range(times):
            status = (await client.ask([{"role": "user", "content": f"Number {number}."}])).status
    return status


async def test_a_reward_under_a_misspelt_role_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(endpoints: dict[str, Endpoint]) -> dict[str, float]:
        for endpoint in endpoints.values():
            await ask(endpoint)
        return {"solver": 1.0, "critc": 0.5}

    run = await roll(agent_task(agent, agents=ROLES), fake())
    assert {rollout.role for rollout in run.rollouts} == {"solver"}
    assert "the role 'critic' leaves a group without a reward: the agent returned no reward of it" in caplog.text


async def test_a_role_that_is_never_asked_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(endpoints: dict[str, Endpoint]) -> dict[str, float]:
        await ask(endpoints["solver"])
        return {"solver": 1.0, "critic": 0.5}

    run = await roll(agent_task(agent, agents=ROLES), fake())
    assert {rollout.role for rollout in run.rollouts} == {"solver"}
    assert "the role 'critic' had no answer in all episodes of a group" in caplog.text


async def test_a_limit_that_one_role_met_is_not_another_roles_end() -> None:
    async def agent(endpoints: dict[str, Endpoint]) -> None:
        await ask(endpoints["critic"])
        await ask(endpoints["solver"], 100)
        raise ValueError("no answer is left")

    run = await roll(agent_task(agent, agents=ROLES, agent_errors={ValueError: 0.0}), fake())
    assert {(each.role, each.finish_reason) for each in run.rollouts} == {("solver", "turn_limit"), ("critic", "stop")}
