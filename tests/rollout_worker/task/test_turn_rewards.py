"""Rewards at turns: of reward functions that return lists, and of tools, environments and agents that give them."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream import Endpoint, reward
from slipstream.environments.base import Step, TurnEnvironment
from slipstream.protocol import codec, reasons
from slipstream.protocol.messages import Group, Rollout
from slipstream.rollout_queue.ledger import validation
from slipstream.rollout_queue.ledger.records import TicketRecord
from slipstream.rollout_worker.task.reward_base import RewardBatch, RewardError
from slipstream.rollout_worker.task.rewards import RewardFunctions
from tests import kit
from tests.kit.agent import agent_task, client_of
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll, task

BATCH = RewardBatch("p", ["one", "two"], [[1], [2]], {"prompt": "p"}, turns=[3, 1])
LARGE = kit.config(
    kit.WORKER, rollout={"max_turn_tokens": 400, "max_episode_tokens": 2000}, vllm={"max_model_len": 8000}
)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def calling(*turns: str) -> Any:
    """A policy that says the turns one after another, whatever it is told."""
    return scripted(TOKENIZER, lambda text, index: turns[min(text.count("<|im_start|>assistant") - 1, len(turns) - 1)])


def check(group: Group) -> None:
    """The queue takes the group."""
    record = TicketRecord(index=group.index, attempt=1, serial=1, worker_id="w0", version=7)
    sent = validation.decode(codec.encode(group), len(group.rollouts))
    sent.ticket_id = record.id
    validation.check_group(sent, record, validation.Rules(len(group.rollouts), 7))


def texts_of_turns(rollout: Rollout) -> list[str]:
    """What was sampled in each turn, by `turn_ends` alone."""
    begins = [0] * len(rollout.segments)
    found = []
    for number, end in ((of.segment, of.end) for of in rollout.turn_ends or ()):
        segment = rollout.segments[number]
        own = segment.token_ids[begins[number] : end][segment.loss_mask[begins[number] : end]]
        found.append(TOKENIZER.decode(own, skip_special_tokens=True))
        begins[number] = end
    return found


def returning(*rewards: Any) -> Any:
    def steps(completions: list[Any], **_: Any) -> Any:
        return list(rewards)

    return steps


async def test_a_function_may_give_one_number_a_turn_beside_one_for_the_whole() -> None:
    functions = RewardFunctions([returning([1, 0.5, -1], (2,)), lambda completions, **_: [4.0, None]], [2.0, 0.5])
    first, second = await functions.score(BATCH)
    assert (first.reward, first.turn_rewards) == (2 * 0.5 + 0.5 * 4, [2.0, 1.0, -2.0 + 2.0])
    assert first.components == {"steps": 0.5, "<lambda>": 4.0}
    assert (second.reward, second.turn_rewards) == (4.0, [4.0])


async def test_a_reward_of_the_whole_counts_at_the_last_turn_whichever_came_first() -> None:
    functions = RewardFunctions([lambda completions, **_: [4.0, 0.0], returning(np.array([1, 0, 0]), None)])
    first, second = await functions.score(BATCH)
    assert (first.reward, first.turn_rewards) == (5.0, [1.0, 0.0, 4.0])
    assert (second.reward, second.turn_rewards) == (0.0, None), "nothing was given at its turns"


async def test_arrays_are_of_turns_also_where_a_rollout_has_one() -> None:
    first, second = await RewardFunctions([returning(np.array([1.0, 2.0, 4.0]), np.array([3.0]))]).score(BATCH)
    assert (first.turn_rewards, second.turn_rewards) == ([1.0, 2.0, 4.0], [3.0])
    column = await RewardFunctions([returning(*np.array([[1.0], [3.0]]))]).score(BATCH)
    assert [(score.reward, score.turn_rewards) for score in column] == [(1.0, None), (3.0, None)]


async def test_without_a_list_there_are_no_rewards_at_turns() -> None:
    scores = await RewardFunctions([returning(np.float64(1), np.float32(2))]).score(BATCH)
    assert [(score.reward, score.turn_rewards) for score in scores] == [(1.0, None), (2.0, None)]


@pytest.mark.parametrize(
    ("rewards", "kind", "names"),
    [
        (([1.0, 2.0], [1.0]), "wrong number of turns", ("2 numbers for completion 0", "3 turns")),
        (([1.0, 2.0, 3.0, 4.0], [1.0]), "wrong number of turns", ("4 numbers for completion 0", "3 turns")),
        (([1.0, math.nan, 0.0], [1.0]), "not finite", ("nan", "turn 1 of completion 0")),
        (([1.0, 0.0, 0.0], [math.inf]), "not finite", ("inf", "turn 0 of completion 1")),
        (([1.0, 0.0, 0.0], 1.0), "mixed", ("completion 0", "a list")),
        ((1.0, [1.0]), "mixed", ("completion 1", "a list")),
        (([1.0, None, 0.0], [1.0]), "not numbers", ("not a list of numbers",)),
        (([1.0, "2", 0.0], [1.0]), "not numbers", ("'2' is text",)),
    ],
)
async def test_a_wrong_list_fails_the_reward_and_names_turn_and_value(
    rewards: Any, kind: str, names: tuple[str, ...]
) -> None:
    with pytest.raises(RewardError) as failure:
        await RewardFunctions([returning(*rewards)]).score(BATCH)
    assert (failure.value.function, failure.value.kind) == ("steps", kind)
    assert all(name in str(failure.value) for name in names), failure.value


async def test_a_wrong_list_fails_the_group_with_its_row_and_nothing_is_recorded() -> None:
    run = await roll(task(rewards=[returning([0.0] * 9, [0.0] * 9)]), fake(), config=LARGE)
    assert run.queue.groups == []
    (failure,) = run.queue.failures.values()
    assert failure.reason == reasons.REWARD
    (notice,) = (notice for notice in run.worker.report().notices if notice.kind == "reward")
    assert "9 numbers for completion 0, which has 2 turns" in notice.text
    assert "at row 0" in notice.text


async def test_lists_travel_with_the_ends_of_turns_and_are_shown_at_them() -> None:
    def steps(completions: list[list[dict[str, Any]]], **_: Any) -> list[list[float]]:
        return [
            [float("tool_calls" in message) for message in messages if message["role"] == "assistant"]
            for messages in completions
        ]

    run = await roll(task(rewards=[steps]), fake(), config=LARGE)
    for rollout in run.rollouts:
        assert (rollout.turns, rollout.turn_rewards, rollout.reward) == (2, [1.0, 0.0], 1.0)
        calls, answers = texts_of_turns(rollout)
        assert "multiply" in calls
        assert answers == "408"
        assert rollout.messages is not None
        shown = [(each["role"], each.get("turn_reward")) for each in json.loads(rollout.messages)]
        assert shown == [("user", None), ("assistant", 1.0), ("tool", None), ("assistant", 0.0)]
    check(run.queue.groups[0])


@pytest.mark.parametrize("credit", ["episode", "turn"])
async def test_the_ends_of_turns_travel_without_rewards_only_where_the_learner_needs_them(credit: str) -> None:
    config = LARGE.model_copy(update={"learner": LARGE.learner.model_copy(update={"credit": credit})})
    run = await roll(task(), fake(), config=config)
    for rollout in run.rollouts:
        assert rollout.turn_rewards is msgspec.UNSET
        if credit == "episode":
            assert rollout.turn_ends is msgspec.UNSET
        else:
            assert texts_of_turns(rollout)[1] == "408"
    check(run.queue.groups[0])


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_tool_rewards_the_turn_that_called_it(is_async: bool) -> None:
    def score(value: float) -> str:
        """Score.

        Args:
            value: How much.
        """
        reward(value, name="score")
        reward(0.25)
        return "scored"

    async def score_async(value: float) -> str:
        """Score.

        Args:
            value: How much.
        """
        await asyncio.sleep(0)
        return await asyncio.to_thread(score, value)

    score_async.__name__ = "score"
    both = call("score", value=1.5) + call("score", value=0.5)
    policy = calling(call("score", value=1), "nothing" if is_async else both, "done")
    tools = [score_async if is_async else score]
    run = await roll(task(tools=tools, rewards=[returning(1.0, None)]), fake(policy), config=LARGE)
    first, second = run.rollouts
    if is_async:
        assert (first.turn_rewards, first.reward) == ([1.25, 1.0], 2.25)
        return
    assert first.turn_rewards == [1.25, 2.5, 1.0]
    assert first.reward_components == {"steps": 1.0, "score": 3.0, "turn": 0.75}
    assert first.reward == 4.75
    assert second.reward_components == {"steps": None, "score": 3.0, "turn": 0.75}
    check(run.queue.groups[0])


async def test_an_environment_rewards_the_turns_that_its_methods_answer() -> None:
    class Game:
        def reset(self) -> None:
            self.moves = 0

        def move(self) -> str:
            """Move."""
            self.moves += 1
            reward(float(self.moves), name="Game")
            return "moved"

        async def respond(self, messages: list[Any]) -> str | None:
            reward(-1.0, name="talk")
            return "move" if self.moves < 2 else None

        def get_reward(self) -> float:
            return 10.0

    policy = calling(call("move"), "well", call("move"), "done")
    run = await roll(task(tools=[], rewards=(), environment=Game), fake(policy), config=LARGE)
    for rollout in run.rollouts:
        assert rollout.turn_rewards == [1.0, -1.0, 2.0, -1.0 + 10.0]
        assert rollout.reward_components == {"Game": 13.0, "talk": -2.0}, "what it gives at turns is its own"
        assert rollout.reward == 11.0
    check(run.queue.groups[0])


async def test_the_steps_of_an_adapted_environment_are_rewarded_at_their_turns() -> None:
    class Counting(TurnEnvironment):
        def _begin(self, columns: Any) -> str:
            self.steps = 0
            return ""

        def _step(self, turn: str) -> Step:
            self.steps += 1
            return Step("on", self.steps / 4, self.steps == 3)

        def close(self) -> None:
            pass

    environment = functools.partial(Counting, "counting")
    run = await roll(task(tools=[], rewards=(), environment=environment), fake(calling("go")), config=LARGE)
    for rollout in run.rollouts:
        assert rollout.turn_rewards == [0.25, 0.5, 0.75]
        assert rollout.reward_components == {"Counting": 1.5}
    alone = Counting("counting")
    alone.reset()
    alone.respond([{"role": "assistant", "content": "go"}])
    assert alone.get_reward() == 0.25, "where no episode runs they add up"


async def test_an_agent_rewards_its_newest_turn_and_segments_keep_their_turns() -> None:
    async def agent(endpoint: Endpoint) -> float:
        async with client_of(endpoint) as client:
            first = [{"role": "user", "content": "first"}]
            reply = await client.ask(first)
            reward(1.0, name="found")
            await client.ask([{"role": "user", "content": "another"}])
            await client.ask([*first, reply.message, {"role": "user", "content": "again"}])
            reward(4.0, name="agent")
        return 0.5

    policy = scripted(TOKENIZER, lambda text, index: text.count("<|im_start|>assistant") * "word ")
    run = await roll(agent_task(agent), fake(policy), config=LARGE)
    for rollout in run.rollouts:
        assert rollout.turn_rewards == [1.0, 0.0, 4.5]
        assert rollout.reward_components == {"agent": 4.5, "found": 1.0}
        assert [of.segment for of in rollout.turn_ends or ()] == [0, 1, 0]
        assert texts_of_turns(rollout) == ["word ", "word ", "word word "]
        assert rollout.messages is not None
        shown = [each["turn_reward"] for each in json.loads(rollout.messages) if "turn_reward" in each]
        assert shown == [1.0, 4.5], "the conversation of the last answer"
    check(run.queue.groups[0])


async def test_a_role_gets_the_rewards_that_name_it() -> None:
    async def agent(endpoints: dict[str, Endpoint]) -> dict[str, float]:
        for role, endpoint in endpoints.items():
            async with client_of(endpoint) as client:
                await client.ask()
            reward(2.0, role=role, name=f"of {role}")
        with pytest.raises(ValueError, match="name one of the roles: solver, critic"):
            reward(1.0)
        return {"solver": 1.0, "critic": 0.0}

    run = await roll(agent_task(agent, agents={"solver": None, "critic": None}), fake(), config=LARGE)
    found = {rollout.role: (rollout.turn_rewards, rollout.reward_components) for rollout in run.rollouts}
    assert found == {
        "solver": ([3.0], {"solver": 1.0, "critic": None, "of solver": 2.0}),
        "critic": ([2.0], {"solver": None, "critic": 0.0, "of critic": 2.0}),
    }


async def test_a_rollout_without_a_reward_that_others_were_given_has_0_of_it() -> None:
    given = iter([1.0, None])
    lock = threading.Lock()

    def try_it() -> str:
        """Try."""
        with lock:
            if (value := next(given)) is not None:
                reward(value, name="luck")
        return "tried"

    run = await roll(
        task(tools=[try_it], rewards=[returning(0.0, 0.0)]), fake(calling(call("try_it"), "done")), config=LARGE
    )
    assert sorted(rollout.reward_components["luck"] or 0.0 for rollout in run.rollouts) == [0.0, 1.0]
    assert sorted(rollout.turn_rewards or [] for rollout in run.rollouts) == [[0.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"value": math.nan}, "slipstream.reward(nan, 'turn') at turn 0: give a finite number"),
        ({"value": "1.0"}, "slipstream.reward('1.0', 'turn') at turn 0: give a finite number"),
        ({"value": 1e31}, "slipstream.reward(1e+31, 'turn') at turn 0"),
        ({"value": 1.0, "name": ""}, "slipstream.reward(1.0, '') at turn 0: name it by a text"),
        ({"value": 1.0, "name": "n" * 129}, "name it by a text of 1 to 128 characters"),
        ({"value": 1.0, "name": "steps"}, "slipstream.reward(..., 'steps') has the name of a reward function"),
    ],
)
async def test_a_reward_that_cannot_be_kept_fails_the_group_with_its_row(given: dict[str, Any], text: str) -> None:
    """The tool may catch what it raises: what was meant is not known."""

    def try_it() -> str:
        """Try."""
        try:
            reward(**given)
        except ValueError:
            return "refused"
        return "kept"

    run = await roll(
        task(tools=[try_it], rewards=[returning(0.0, 0.0)]), fake(calling(call("try_it"), "done")), config=LARGE
    )
    assert run.queue.groups == []
    notices = [notice.text for notice in run.worker.report().notices if notice.kind == "reward"]
    assert any(text in notice and "at row 0" in notice for notice in notices), notices


async def test_no_turn_no_reward() -> None:
    async def agent(endpoint: Endpoint) -> float:
        with pytest.raises(ValueError, match="before the policy's first turn"):
            reward(1.0)
        async with client_of(endpoint) as client:
            await client.ask()
        return 1.0

    run = await roll(agent_task(agent), fake(), config=LARGE)
    assert run.queue.groups == [], "the agent meant to reward something"


def test_outside_an_episode_it_says_where_to_call_it() -> None:
    with pytest.raises(RuntimeError, match="no episode runs here"):
        reward(1.0)


async def test_a_tool_that_comes_back_late_rewards_nothing() -> None:
    """Its call has timed out, and its group has its rewards."""
    release, done = threading.Event(), threading.Event()

    def hang() -> str:
        """Hang."""
        release.wait(30)
        reward(100.0)
        done.set()
        return "late"

    config = LARGE.model_copy(update={"worker": LARGE.worker.model_copy(update={"tool_timeout_s": 0.05})})
    run = await roll(
        task(tools=[hang], rewards=[returning(1.0, 1.0)]), fake(calling(call("hang"), "done")), config=config
    )
    release.set()
    await asyncio.to_thread(done.wait, 10)
    assert [rollout.turn_rewards for rollout in run.rollouts] == [msgspec.UNSET] * 2


async def test_turns_that_follow_each_other_without_a_token_between_them_have_their_own_ends() -> None:
    async def agent(endpoint: Endpoint) -> float:
        async with client_of(endpoint) as client:
            first = await client.post(
                json.dumps({"model": endpoint.model, "prompt": "one", "return_token_ids": True}), "/completions"
            )
            ids = [*first.body["choices"][0]["prompt_token_ids"], *first.body["choices"][0]["token_ids"]]
            await client.post(json.dumps({"model": endpoint.model, "prompt": ids}), "/completions")
            reward(1.0)
        return 0.0

    run = await roll(agent_task(agent), fake(scripted(TOKENIZER, lambda text, index: "word")), config=LARGE)
    for rollout in run.rollouts:
        (one,) = rollout.segments
        first, second = rollout.turn_ends or ()
        assert first.segment == second.segment == 0
        assert one.loss_mask[first.end - 1 : second.end].all(), "one run of sampled tokens"
        assert rollout.turn_rewards == [0.0, 1.0]
    check(run.queue.groups[0])
