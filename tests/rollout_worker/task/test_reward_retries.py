"""A reward that fails costs a retry of that reward alone."""

import asyncio
import threading

import pytest

from slipstream.protocol import reasons
from slipstream.rollout_worker.task.reward_base import RewardBatch, RewardError
from slipstream.rollout_worker.task.rewards import RewardFunctions
from slipstream.rollout_worker.user_code import UserCode
from tests.kit import WORKER, config
from tests.kit.worker import accuracy, fake, roll, task

BATCH = RewardBatch("2 by 3", ["6", "7"], [[6], [7]], {"prompt": "2 by 3"})


class Clock:
    """Time that passes in sleeps alone; `slept` holds them."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Failing:
    """Fails `times` times, then gives ones."""

    __name__ = "failing"

    def __init__(self, times):
        self.times = times
        self.calls = 0

    def __call__(self, completions, **kwargs):
        self.calls += 1
        if self.calls <= self.times:
            raise OSError("hiccup")
        return [1.0] * len(completions)


async def test_a_reward_is_tried_again_after_pauses_that_grow_and_the_others_are_not():
    clock, failing, other = Clock(), Failing(3), Failing(0)
    other.__name__ = "other"
    rewards = RewardFunctions([failing, other], attempts=4, clock=clock, sleep=clock.sleep)
    told = []
    scores = await rewards.score(BATCH, told.append)
    assert [score.reward for score in scores] == [2.0, 2.0]
    assert (failing.calls, other.calls) == (4, 1)
    assert clock.slept == [0.25, 0.5, 1.0]
    assert [str(error) for error in told] == ["failing: OSError: hiccup"] * 3


async def test_the_last_try_s_error_is_raised():
    clock, failing = Clock(), Failing(10)
    with pytest.raises(RewardError, match="failing: OSError: hiccup"):
        await RewardFunctions([failing], attempts=3, clock=clock, sleep=clock.sleep).score(BATCH)
    assert failing.calls == 3


async def test_all_tries_have_to_be_done_within_the_time_out():
    """So that a ticket's greatest age, which counts one time-out, holds."""
    clock, failing = Clock(), Failing(100)
    rewards = RewardFunctions([failing], timeout_s=5.0, attempts=50, clock=clock, sleep=clock.sleep)
    with pytest.raises(RewardError):
        await rewards.score(BATCH)
    assert clock.now < 5.0
    assert failing.calls == 5  # after 0, 0.25, 0.75, 1.75 and 3.75 s


@pytest.mark.parametrize("values", [[1.0], ["good", "bad"], 3, [float("nan"), 0.0]])
async def test_a_wrong_answer_is_not_asked_for_again(values):
    clock, calls = Clock(), []

    def wrong(completions, **kwargs):
        calls.append(1)
        return values

    with pytest.raises(RewardError):
        await RewardFunctions([wrong], attempts=5, clock=clock, sleep=clock.sleep).score(BATCH)
    assert (len(calls), clock.slept) == (1, [])


async def test_a_time_out_is_not_tried_again():
    calls = []

    async def endless(completions, **kwargs):
        calls.append(1)
        await asyncio.Event().wait()

    with pytest.raises(RewardError, match=r"no answer within 0\.05 s"):
        await RewardFunctions([endless], timeout_s=0.05, attempts=5).score(BATCH)
    assert len(calls) == 1


async def test_a_wait_for_a_thread_is_no_part_of_the_time_out(monkeypatch):
    """Two groups are rewarded by one thread: while the one waits, twice what its reward may take goes by."""
    clock, go_on, began = Clock(), threading.Event(), threading.Event()

    def slow(completions, **kwargs):
        began.set()
        go_on.wait(30)
        return [1.0, 1.0]

    async with UserCode(threads=1) as code:
        loop, ahead = asyncio.get_running_loop(), [0.0]
        monkeypatch.setattr(loop, "time", lambda time=loop.time: time() + ahead[0])
        first = asyncio.create_task(RewardFunctions([slow], timeout_s=1000.0, code=code).score(BATCH))
        await asyncio.to_thread(began.wait, 30)
        failing = Failing(1)
        rewards = RewardFunctions([failing], timeout_s=50.0, attempts=2, code=code, clock=loop.time, sleep=clock.sleep)
        second = asyncio.create_task(rewards.score(BATCH))
        await asyncio.sleep(0.01)
        ahead[0] += 100.0
        go_on.set()
        assert [score.reward for score in await first] == [1.0, 1.0]
        assert [score.reward for score in await second] == [1.0, 1.0]
    assert (failing.calls, clock.slept) == (2, [0.25])


async def test_a_hiccup_costs_no_generation_and_is_counted_and_told():
    failing = Failing(1)
    server = fake()
    run_config = config(WORKER, worker={"reward_attempts": 2})
    run = await roll(task(rewards=[accuracy, failing]), server, config=run_config)
    assert len(run.queue.groups) == 1
    assert run.queue.failures == {}
    assert run.worker.report().failures == {reasons.REWARD_RETRIED: 1}
    (notice,) = run.worker.report().notices
    assert notice.text.startswith("reward failing: OSError: hiccup; at row 0")
    requests = len(server.requests)
    run = await roll(task(rewards=[accuracy]), alone := fake(), config=run_config)
    assert len(alone.requests) == requests
