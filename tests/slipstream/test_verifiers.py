"""Environments of the library `verifiers` as tasks. What needs the library is skipped where it is not installed."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream import Endpoint
from slipstream.protocol.config import ConfigError
from slipstream.verifiers import _outcome, verifiers_task
from tests.kit.fake_openai import FakeOpenAI
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="needs slipstream-rl[verifiers] in its own environment"
)
TALKS = {"agent": {"harness": {"id": "null"}}}


@pytest.fixture(autouse=True)
def environments() -> Iterator[None]:
    folder = str(Path(__file__).parent / "verifiers_environments")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(ConfigError, match=r"install slipstream-rl\[verifiers\]"):
        verifiers_task("doubling-v1")


def episode(**changes: Any) -> SimpleNamespace:
    """Return what the library tells of an episode."""
    reward = SimpleNamespace(value=0.5)
    trace = SimpleNamespace(
        ok=True,
        errors=[],
        agent=SimpleNamespace(name="agent"),
        rewards={"exact": reward, "unscored": None},
        metrics={"asked": 2.0, "chat/new_segments": 1.0, "unscored": None},
        reward=0.5,
        stop_condition="agent_completed",
    )
    env = SimpleNamespace(id="doubling-v1")
    return SimpleNamespace(**{"ok": True, "errors": [], "traces": [trace], "env": env, **changes})


def test_what_an_environment_says_of_an_episode() -> None:
    assert _outcome(episode(), "agent") == {
        "exact": 0.5,
        "asked": 2.0,
        "verifiers/chat/new_segments": 1.0,
        "stop_condition": "agent_completed",
        "reward": 0.5,
    }


def test_an_episode_that_failed_is_no_reward_of_zero() -> None:
    errors = [SimpleNamespace(type="TaskError", message="scoring: no such file")]
    with pytest.raises(RuntimeError, match="verifiers: TaskError: scoring: no such file"):
        _outcome(episode(ok=False, errors=errors), "agent")


def test_a_program_that_died_of_a_limit_has_a_reward_of_zero() -> None:
    message = "upstream 400: {'error': {'code': 'context_length_exceeded'}}"
    errors = [SimpleNamespace(type="ProviderError", message=message)]
    assert _outcome(episode(ok=False, errors=errors), "agent")["reward"] == 0.0


def test_several_runs_of_the_agent_have_no_reward_in_common() -> None:
    (trace,) = episode().traces
    with pytest.raises(RuntimeError, match="ran its agent 'agent' 2 times"):
        _outcome(episode(traces=[trace, trace]), "agent")


@needs_library
class TestLoading:
    def test_rows_are_the_librarys_tasks(self) -> None:
        task = verifiers_task("doubling-v1", taskset={"count": 3}, select={"skip": 1})
        first = task.rows.row_for(0, seed=0, shuffle=False).columns
        assert task.rows.size == 2
        assert first["prompt"] == [{"role": "user", "content": "What is 1 + 1?"}]

    @pytest.mark.parametrize(
        ("environment", "fields", "wrong"),
        [
            ("no-such-set", TALKS, "no-such-set"),
            ("doubling-v1", {"taskset": {"cuont": 3}}, "cuont"),
            ("doubling-v1", {"agent": {"harness": {"id": "bash"}}}, "executes what the policy writes; say where"),
            ("doubling-v1", {"agent": {"client": {"type": "eval"}}}, "has 0 agents"),
            ("doubling-v1", {"id": "agentic-judge"}, "one can be trained"),
        ],
    )
    def test_what_cannot_be_trained_is_refused_at_load(self, environment: str, fields: Any, wrong: str) -> None:
        with pytest.raises(ConfigError, match=wrong):
            verifiers_task(environment, **fields)

    def test_an_empty_selection(self) -> None:
        task = verifiers_task("doubling-v1", select={"skip": 100})
        with pytest.raises(ConfigError, match="gave no task"):
            _ = task.rows


async def ended() -> None:
    """As the end of the loop of user code does."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@needs_library
class TestEpisodes:
    async def test_each_episode_asks_with_its_own_key(self) -> None:
        model = FakeOpenAI(lambda messages: "4")
        async with model.serving() as base_url:
            agent = verifiers_task("doubling-v1").agent
            assert agent is not None
            results = await asyncio.gather(
                *(agent(endpoint=Endpoint(base_url, f"key-{n}", "policy"), verifiers_task=n) for n in range(4))
            )
            await ended()
        assert [result["reward"] for result in results] == [0.0, 0.0, 0.5, 0.0]
        assert results[2] == {"exact": 0.5, "asked": 1.0, "stop_condition": "agent_completed", "reward": 0.5}
        questions = {asked.authorization: asked.body["messages"][-1]["content"] for asked in model.requests}
        assert questions == {f"Bearer key-{n}": f"What is {n} + {n}?" for n in range(4)}
        assert {asked.body["model"] for asked in model.requests} == {"policy"}

    async def test_a_whole_worker_plays_and_records_them(self) -> None:
        policy = scripted(TOKENIZER, lambda text, index: "4")
        done = await roll(verifiers_task("doubling-v1"), fake(policy), tickets=4)
        assert len(done.queue.groups) == 4
        by_answer = sorted(rollout.reward for rollout in done.rollouts)
        assert by_answer == [0.0] * (len(by_answer) * 3 // 4) + [0.5] * (len(by_answer) // 4)
        assert {rollout.metrics["asked"] for rollout in done.rollouts} == {1.0}
        assert all(rollout.extra["stop_condition"] == "agent_completed" for rollout in done.rollouts)

    async def test_a_program_that_fails_is_a_failed_episode(self) -> None:
        agent = verifiers_task("doubling-v1", agent={"harness": {"id": "doubling-v1", "fails": True}}).agent
        assert agent is not None
        with pytest.raises(RuntimeError, match="out of ideas"):
            await agent(endpoint=Endpoint("http://127.0.0.1:9/v1", "key", "policy"), verifiers_task=0)
        await ended()
