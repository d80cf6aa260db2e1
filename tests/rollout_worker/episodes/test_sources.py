"""The contract of task kinds: whatever makes the episodes, the same holds of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slipstream.protocol import reasons
from slipstream.rollout_worker.agent.source import AgentSource
from slipstream.rollout_worker.data.columns import ENVIRONMENTS
from slipstream.rollout_worker.data.dataset import RowSample
from slipstream.rollout_worker.episodes.capacity import Capacity
from slipstream.rollout_worker.episodes.conversation import ConversationSource
from slipstream.rollout_worker.episodes.environment import EnvironmentSource
from slipstream.rollout_worker.episodes.episode import Episode
from slipstream.rollout_worker.episodes.limits import EpisodeLimits
from slipstream.rollout_worker.episodes.runner import EpisodeRunner
from slipstream.rollout_worker.episodes.source import EpisodeSource, GroupPlan, SourceContext
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.failures import EpisodeFailed
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.inference.sampler import Sampler
from slipstream.rollout_worker.sources import SOURCES, source_of
from slipstream.rollout_worker.task.reward_base import RESULTS
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.user_code import UserCode
from tests.kit import WORKER, config
from tests.kit.agent import MULTIPLY, agent_task, client_of, results_of
from tests.kit.fake_vllm import Fault, serving
from tests.kit.stand_in_queue import serving_at
from tests.kit.worker import TOKENIZER, fake, row, task

CONFIG = config(WORKER)
COUNT = 3


async def multiplier(endpoint: Any, prompt: list[dict[str, Any]]) -> dict[str, Any]:
    """Asks as often as it gets calls."""
    messages = list(prompt)
    async with client_of(endpoint) as client:
        while True:
            reply = await client.ask(messages, tools=[MULTIPLY])
            if reply.status != 200:
                raise RuntimeError(reply.error["message"])
            messages += [reply.message, *results_of(reply.message)]
            if not reply.message.get("tool_calls"):
                return {"reward": 1.0, "said": reply.message["content"]}


class Desk:
    """An environment that multiplies."""

    def reset(self, **columns: Any) -> None:
        """Nothing is added to the row's prompt."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        return a * b

    def get_reward(self) -> float:
        return 1.0


# A task of each kind, and what its reward functions may ask for. A new kind needs an entry.
TASKS: dict[type[EpisodeSource], tuple[Callable[[], Task], set[str]]] = {
    ConversationSource: (task, set()),
    EnvironmentSource: (lambda: task(tools=(), rewards=(), environment=Desk), {ENVIRONMENTS}),
    AgentSource: (lambda: agent_task(multiplier), {RESULTS}),
}
each_kind = pytest.mark.parametrize("kind", SOURCES, ids=lambda kind: kind.__name__)


@asynccontextmanager
async def opened(kind: type[EpisodeSource], *faults: Fault) -> AsyncIterator[tuple[Any, EpisodeRunner, Any]]:
    """A source of the kind, a runner at a fake server with these faults, and the plan of a group's episodes."""
    make, _ = TASKS[kind]
    the_task = make()
    capacity = Capacity(4, 8, time.monotonic)
    async with (
        serving(fake(faults=faults)) as url,
        InferenceClient(10.0) as client,
        UserCode(4) as code,
        kind.open(SourceContext(CONFIG, the_task, code, TOKENIZER)) as source,
    ):
        pool = ServerPool(_ignore)
        pool.update(serving_at(url, version=7))
        sampler = Sampler(client, pool, CONFIG, source.chat.stop_token_ids)
        runner = EpisodeRunner(sampler, EpisodeLimits.of(CONFIG), 60.0, capacity, code=code)
        reservation = capacity.begin(COUNT)
        plan = GroupPlan(the_task.row_for(0, 0), COUNT, pool.tick, reservation, runner)
        yield source, runner, plan
        capacity.end(COUNT, reservation)
        plan.after.close()
        assert capacity.free == capacity.total, "every slot came back"


async def _ignore(server: Any) -> None:
    """Ignore what the pool reports of a server."""


def test_every_kind_is_tested() -> None:
    assert set(TASKS) == set(SOURCES)


@each_kind
def test_exactly_one_source_accepts_a_task(kind: type[EpisodeSource]) -> None:
    make, _ = TASKS[kind]
    assert [source for source in SOURCES if source.accepts(make())] == [kind]
    assert source_of(make()) is kind


@each_kind
async def test_i4_a_source_gives_an_outcome_for_each_episode_with_every_sampled_token(
    kind: type[EpisodeSource],
) -> None:
    async with opened(kind) as (source, runner, plan):
        outcomes = await source.run(plan)
        assert len(outcomes) == COUNT
        for episode in outcomes:
            assert isinstance(episode, Episode)
            rollout = episode.rollout
            assert (rollout.finish_reason, rollout.turns, rollout.tool_calls, rollout.tool_failures) == (
                "stop",
                2,
                1,
                0,
            )
            assert rollout.timings.keys() >= {"generate", "total"}
            assert (episode.messages[-1]["content"], episode.text.endswith("408")) == ("408", True)
            (segment,) = episode.segments(["vllm-0"])
            assert len(segment.token_ids) == len(segment.loss_mask) == len(segment.logprobs)
            assert "Multiply 12 by 34." in TOKENIZER.decode(segment.token_ids)
            covered = [at for span in segment.version_spans for at in range(span.start, span.end)]
            assert covered == segment.loss_mask.nonzero()[0].tolist()
            assert len(covered) == episode.sampled_tokens
            assert {span.version for span in segment.version_spans} == {7}
            assert (segment.logprobs[segment.loss_mask] < 0).all()
            assert not segment.logprobs[~segment.loss_mask].any()
        assert runner.capacity.open == COUNT
        assert runner.sampler.pool.waiting == 0


@each_kind
async def test_an_episode_brings_its_own_rewards_and_what_reward_functions_may_ask_for(
    kind: type[EpisodeSource],
) -> None:
    _, names = TASKS[kind]
    async with opened(kind) as (source, _, plan):
        for episode in await source.run(plan):
            assert episode.rewards == dict.fromkeys(source.own_rewards, 1.0)
            assert set(episode.reward_inputs()) == names
            assert episode.why_no_reward.reason == reasons.NO_REWARD
            assert episode.why_no_reward.text


@each_kind
async def test_i9_a_request_that_fails_is_an_outcome_and_gives_the_slots_back(kind: type[EpisodeSource]) -> None:
    async with opened(kind, Fault("status", times=None, status=400)) as (source, _, plan):
        outcomes = await source.run(plan)
        assert [type(outcome) for outcome in outcomes] == [EpisodeFailed] * COUNT
        assert all(str(outcome) for outcome in outcomes)


@each_kind
async def test_a_source_says_how_many_episodes_it_has_open_and_what_the_policy_is_shown(
    kind: type[EpisodeSource],
) -> None:
    async with opened(kind) as (source, _, _):
        assert source.max_open >= 1
        assert [*source.tool_schemas] == [*source.tool_schemas], "the same for every fingerprint"
        assert source.chat.tokenizer is TOKENIZER


@each_kind
async def test_a_good_task_passes_the_check_with_findings_for_each_data_set(kind: type[EpisodeSource]) -> None:
    make, _ = TASKS[kind]
    the_task = make()
    sample = RowSample(the_task.rows, the_task.rows.sample, "task.path = t.py", "", "will be dropped")
    async with UserCode(4) as code:
        context = SourceContext(CONFIG, the_task, code, TOKENIZER)
        found = await kind.check_samples(context, [sample, sample])
    assert [each.warnings for each in found] == [[], []]
    for each in found:
        if each.chat_of is not None:
            assert await each.chat_of(row()).prompt_ids(row()["prompt"])
