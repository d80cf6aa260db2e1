"""Whole workers whose task, or whose policy, does its worst: none ends, and the other groups come through (I9)."""

import asyncio
import json
import threading

import pytest

from slipstream.protocol import codec, reasons
from slipstream.protocol.messages import Group
from slipstream.rollout_worker.ticket_loop import UserCodeShutOff
from slipstream.rollout_worker.user_code import boundary
from tests.kit import WORKER, config
from tests.kit.fake_vllm.policies import in_turn, multiplying, scripted
from tests.kit.stand_in_queue import StandInQueue, tickets_for
from tests.kit.worker import TOKENIZER, accuracy, fake, multiply, roll, row, task, until

LONG = config(WORKER, rollout={"max_turn_tokens": 600, "max_episode_tokens": 2000}, vllm={"max_model_len": 4000})


def saying(*turns):
    return fake(scripted(TOKENIZER, in_turn(list(turns))), max_model_len=8000)


def called(arguments, name="multiply"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def wire(run):
    """The groups, as the queue reads them."""
    return [codec.decode(codec.encode(group), Group) for group in run.queue.groups]


@pytest.mark.parametrize("keep_messages", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 12345678901234567890, "b": 34}',
        '{"a": "\\ud800", "b": 34}',
        '{"\\udfff": 1}',
        '{"a": 1e999, "b": NaN}',
        '{"a": ' + "9" * 300 + ', "b": 1}',
        '{"a": ' + "[" * 200 + "]" * 200 + ', "b": 1}',
    ],
    ids=["20 digits", "surrogate", "surrogate key", "not finite", "300 digits", "deep"],
)
async def test_i9_what_the_policy_writes_into_a_call_ends_no_worker(arguments, keep_messages):
    run_config = config(
        WORKER,
        rollout={"max_turn_tokens": 600, "max_episode_tokens": 2000},
        vllm={"max_model_len": 4000},
        worker={"keep_messages": keep_messages},
    )
    run = await roll(task(), saying(called(arguments), "408"), config=run_config)
    (group,) = wire(run)
    for rollout in group.rollouts:
        assert (rollout.turns, rollout.reward) == (2, 1.0)
        assert (rollout.messages is not None) == keep_messages
        assert not keep_messages or json.loads(rollout.messages)[-1]["content"] == "408"


async def test_i9_an_argument_of_more_digits_than_python_reads_ends_no_worker():
    run_config = config(
        WORKER, rollout={"max_turn_tokens": 6000, "max_episode_tokens": 7000}, vllm={"max_model_len": 8000}
    )
    run = await roll(task(), saying(called('{"a": ' + "9" * 5000 + ', "b": 1}'), "408"), config=run_config)
    assert [(rollout.turns, rollout.tool_failures, rollout.reward) for rollout in run.rollouts] == [(2, 1, 1.0)] * 2


async def interrupted(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    raise KeyboardInterrupt


async def interrupted_later(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return await asyncio.create_task(interrupted(a, b))


@pytest.mark.parametrize("tool", [interrupted, interrupted_later])
async def test_i9_an_async_tool_that_is_interrupted_ends_no_worker(tool, monkeypatch):
    monkeypatch.setattr(tool, "__name__", "multiply")
    run = await roll(task(tools=[tool]), fake(), tickets=3)
    assert [rollout.tool_failures for rollout in run.rollouts] == [1] * 6
    (notice,) = run.worker.report().notices
    assert "KeyboardInterrupt" in notice.text


def generator(completions, answer, **columns):
    yield from accuracy(completions, answer)


def mapped(completions, answer, **columns):
    return map(slowly, completions, answer)


def slowly(turns, right):
    assert threading.current_thread() is not threading.main_thread()
    return float(turns[-1]["content"] == str(right))


async def async_generator(completions, answer, **columns):
    for value in accuracy(completions, answer):
        yield value


@pytest.mark.parametrize("reward", [generator, mapped, async_generator])
async def test_i9_a_reward_that_gives_its_values_one_by_one_is_heard_out(reward):
    run = await roll(task(rewards=[reward]), fake(), tickets=2)
    assert [rollout.reward for rollout in run.rollouts] == [1.0] * 4


class Exiting(list):
    """Rows of which one can only be read at the start."""

    reads = 0

    def __getitem__(self, place):
        self.reads += 1
        if place == 0 and self.reads > 1:
            raise SystemExit(3)
        return super().__getitem__(place)


async def test_i9_a_row_that_exits_ends_no_worker():
    run = await roll(task(dataset=Exiting([row(), row(2, 3)])), fake(), tickets=2)
    ((_, failure),) = run.queue.failures.items()
    assert (failure.reason, failure.retryable) == ("row", False)
    assert "row 0 of the data set: SystemExit(3)" in failure.detail
    assert len(run.queue.groups) == 1


async def test_i9_a_blocking_async_tool_stops_neither_the_worker_nor_the_groups_that_follow():
    """The first call blocks its event loop until one of another group is answered. Calls on that loop are late."""
    over, blocked = threading.Event(), threading.Event()

    async def blocks_once(a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        if blocked.is_set():
            over.set()
        else:
            blocked.set()
            over.wait()
        return a * b

    blocks_once.__name__ = "multiply"
    run_config = config(WORKER, worker={"episodes": 2, "tool_timeout_s": 1.0})
    run = await roll(task(tools=[blocks_once]), fake(), tickets=3, config=run_config, ping_s=0.005)
    assert all(rollout.tool_failures <= 1 for rollout in run.rollouts[:2])
    assert [(rollout.tool_failures, rollout.reward) for rollout in run.rollouts[2:]] == [(0, 1.0)] * 4
    assert run.queue.failures == {}
    (notice,) = (notice for notice in run.worker.report().notices if "event loop" in notice.text)
    assert "blocks_once blocks the event loop of async code" in notice.text
    assert f"{__file__}:" in notice.text


async def test_i9_hung_calls_are_reported():
    release = threading.Event()

    def hang(a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        release.wait()
        return a * b

    hang.__name__ = "multiply"
    run_config = config(WORKER, worker={"tool_timeout_s": 0.3, "user_threads": 8})
    run = await roll(task(tools=[hang]), fake(), tickets=4, config=run_config)
    report = run.worker.report()
    assert report.hung_calls == 8
    texts = [notice.text for notice in report.notices if notice.kind == "code"]
    assert texts[0].startswith("1 call of tools has not come back")
    release.set()
    await until(lambda: run.worker.report().hung_calls == 0)


def hangs_in(release):
    def multiply(a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        release.wait()
        return a * b

    return multiply


async def test_i9_tools_that_hang_fail_no_row_and_no_reward():
    """Every ticket failed as a row that could not be read."""
    release = threading.Event()
    run_config = config(WORKER, worker={"tool_timeout_s": 0.01, "user_threads": 1})
    run = await roll(task(tools=[hangs_in(release)]), fake(), tickets=6, config=run_config)
    release.set()
    assert run.queue.failures == {}
    assert len(run.queue.groups) == 6


async def test_i9_a_worker_whose_user_code_is_shut_off_gives_its_tickets_back_and_ends_with_the_reason(monkeypatch):
    """It lived on, and failed ticket after ticket."""
    release = threading.Event()
    monkeypatch.setattr(boundary, "MIN_SHUT_OFF_S", 0.0)
    run_config = config(WORKER, worker={"reward_timeout_s": 0.02, "user_threads": 1, "episodes": 16})

    def reward(completions, **columns):
        release.wait()
        return [1.0] * len(completions)

    queue = StandInQueue(tickets_for(40, 2), keep_open=True)
    with pytest.raises(
        UserCodeShutOff, match=r"of them of .*reward \(.*test_hostile_code.py:\d+\).*time-out of its own"
    ):
        await roll(task(rewards=[reward]), fake(), config=run_config, queue=queue)
    release.set()
    assert len(queue.failures) == queue.issued > 0, "none is held on to"
    stopped = [failure for failure in queue.failures.values() if failure.reason == reasons.WORKER_STOPPED]
    assert all("have not come back" in failure.detail and failure.retryable for failure in stopped)
    others = {failure.reason for failure in queue.failures.values()} - {reasons.WORKER_STOPPED}
    assert others <= {reasons.REWARD}


def meddling(prompts, completions, completion_ids, answer, notes, **columns):
    """Changes whatever it gets."""
    rewards = accuracy(completions, answer)
    for prompt, turns in zip(prompts, completions, strict=True):
        prompt.append({"role": "user", "content": "and 1 by 1"})
        prompt[0]["content"] = "gone"
        turns.clear()
    notes[0].append("seen")
    prompts.clear()
    completions.clear()
    completion_ids.clear()
    return rewards


async def test_i9_what_a_reward_changes_is_seen_by_nobody_else():
    """Appended prompts changed later epochs."""
    rows = [row(notes=[])]
    run = await roll(task(dataset=rows, rewards=[meddling, accuracy]), fake(), tickets=3)
    assert rows == [row(notes=[])]
    assert len({tuple(rollout.segments[0].token_ids.tolist()) for rollout in run.rollouts}) == 1
    for rollout in run.rollouts:
        assert rollout.reward == 2.0
        said = json.loads(rollout.messages)
        assert [message["role"] for message in said] == ["user", "assistant", "tool", "assistant"]
        assert said[0]["content"] == "Multiply 12 by 34."


async def test_i9_what_a_tool_changes_is_not_what_was_said():
    def clear(keys: list[str]) -> str:
        """Clear a list.

        Args:
            keys: The list.
        """
        keys.clear()
        return "408"

    run = await roll(task(tools=[clear]), saying(called('{"keys": ["a"]}', "clear"), "408"), config=LONG)
    for rollout in run.rollouts:
        (call,) = json.loads(rollout.messages)[1]["tool_calls"]
        assert call["function"]["arguments"] == {"keys": ["a"]}


async def test_i9_a_long_tool_result_is_cut_and_the_episode_goes_on():
    def page(a: int, b: int) -> str:
        """Multiply two integers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        return "lorem ipsum " * 420_000

    page.__name__ = "multiply"

    def talk(text, index):
        return "408" if "tool_response" in text else multiplying(text, index)

    run_config = config(
        WORKER,
        rollout={"max_turn_tokens": 64, "max_episode_tokens": 256, "max_tool_result_tokens": 300},
        vllm={"max_model_len": 1024},
    )
    run = await roll(task(tools=[page]), fake(scripted(TOKENIZER, talk)), config=run_config)
    for rollout in run.rollouts:
        assert (rollout.turns, rollout.finish_reason, rollout.reward) == (2, "stop", 1.0)
        assert 300 < len(rollout.segments[0].token_ids) < 600
        (answer,) = (message for message in json.loads(rollout.messages) if message["role"] == "tool")
        assert "characters left out" in answer["content"]


async def test_i9_a_tool_that_is_not_hostile_is_as_before():
    run = await roll(task(tools=[multiply]), fake(), tickets=2)
    assert [rollout.reward for rollout in run.rollouts] == [1.0] * 4
    assert run.worker.report().hung_calls == 0
    assert run.worker.report().notices == []


async def test_i9_an_error_with_a_lone_surrogate_ends_no_worker():
    """As the name of a file that is not UTF-8 has one."""

    def reward(completions, **columns):
        raise FileNotFoundError("no file caf\udce9.txt")

    run = await roll(task(rewards=[reward]), fake(), tickets=3)
    assert [(failure.reason, failure.detail) for failure in run.queue.failures.values()] == [
        (reasons.REWARD, "reward: FileNotFoundError: no file caf?.txt")
    ] * 3
    codec.encode_json(run.worker.report())


async def test_i9_a_tool_whose_error_has_a_lone_surrogate_ends_no_worker():
    def multiply(a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        raise FileNotFoundError("no file caf\udce9.txt")

    run = await roll(task(tools=[multiply]), fake())
    assert [rollout.tool_failures for rollout in run.rollouts] == [1, 1]
    assert wire(run)
    codec.encode_json(run.worker.report())


async def test_i9_a_group_that_cannot_be_sent_gives_its_ticket_back():
    queue = StandInQueue(tickets_for(3))
    queue.submit_error = UnicodeEncodeError("utf-8", "\udce9", 0, 1, "surrogates not allowed")
    run = await roll(task(), fake(), queue=queue)
    assert [failure.reason for failure in queue.failures.values()] == [reasons.INTERNAL] * 3
    assert run.worker.counters.failures == {reasons.failed(reasons.INTERNAL): 3}
