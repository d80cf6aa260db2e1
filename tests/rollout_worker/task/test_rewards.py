import asyncio
import itertools
import math
import re
import threading

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.reward_base import RewardBatch, RewardError
from slipstream.rollout_worker.task.rewards import RewardFunctions

PROMPT = [{"role": "user", "content": "2 by 3"}]
BATCH = RewardBatch(
    prompt=PROMPT,
    completions=[[{"role": "assistant", "content": "6"}], [{"role": "assistant", "content": "7"}]],
    completion_ids=[[6], [7, 7]],
    columns={"prompt": PROMPT, "answer": 6},
)


def exact(prompts, completions, completion_ids, answer, **kwargs):
    """As a TRL reward is written."""
    assert prompts == [PROMPT, PROMPT]
    assert completion_ids == [[6], [7, 7]]
    assert set(kwargs) == {"trainer_state", "log_metric", "log_extra"}
    return [float(turns[-1]["content"] == str(right)) for turns, right in zip(completions, answer, strict=True)]


async def brevity(completion_ids, **kwargs):
    await asyncio.sleep(0)
    return [-float(len(ids)) for ids in completion_ids]


def only_first(completions, **kwargs):
    return [1] + [None] * (len(completions) - 1)


def silent(completions, **kwargs):
    return [None] * len(completions)


async def test_trls_signature_and_the_weighted_sum():
    scores = await RewardFunctions([exact, brevity], [1.0, 0.5]).score(BATCH)
    assert [score.reward for score in scores] == [1.0 - 0.5, 0.0 - 1.0]
    assert scores[1].components == {"exact": 0.0, "brevity": -2.0}


async def test_none_is_left_out_of_the_sum_and_kept_as_component():
    first, second = await RewardFunctions([only_first, silent]).score(BATCH)
    assert (first.reward, first.components) == (1.0, {"only_first": 1.0, "silent": None})
    assert second.reward is None


def too_few(completions, **kwargs):
    return [1.0]


def not_numbers(completions, **kwargs):
    return ["good", "bad"]


def no_list(completions, **kwargs):
    return 1.0


def not_a_number(completions, **kwargs):
    return [math.nan, 0.0]


def text_of_a_number(completions, **kwargs):
    return ["1.0", 0.0]


def broken(completions, **kwargs):
    raise KeyError("answer")


async def endless(completions, **kwargs):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (too_few, "too_few returned 1 rewards for 2 completions"),
        (not_numbers, "not a list of numbers"),
        (no_list, "not a list of numbers"),
        (not_a_number, "returned nan"),
        (text_of_a_number, "'1.0' is text, and a reward is a number"),
        (broken, "broken: KeyError: 'answer'"),
        (endless, "endless: no answer within 0.5 s"),
    ],
)
async def test_a_reward_that_fails_says_which_and_how(function, message):
    with pytest.raises(RewardError, match=message):
        await RewardFunctions([exact, function], timeout_s=0.5).score(BATCH)


class Odd:
    def __init__(self, how):
        self.how = how

    def __float__(self):
        if self.how == "hang":
            threading.Event().wait()
        raise SystemExit(self.how)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("how", "message"), [("hang", "no answer within 0.2 s"), ("exit", "SystemExit(exit)")])
async def test_i9_a_reward_whose_float_fails_or_hangs_fails_the_reward_and_blocks_nothing(is_async, how, message):
    def odd(completions, **kwargs):
        return (Odd(how) for _ in completions)

    async def odd_async(completions, **kwargs):
        return odd(completions)

    with pytest.raises(RewardError, match=re.escape(message)):
        await RewardFunctions([odd_async if is_async else odd], timeout_s=0.2).score(BATCH)


async def test_rewards_run_side_by_side():
    both = asyncio.Barrier(2)

    async def one(completions, **kwargs):
        await both.wait()
        return [0.0] * len(completions)

    async def two(completions, **kwargs):
        await both.wait()
        return [1.0] * len(completions)

    scores = await RewardFunctions([one, two], timeout_s=5).score(BATCH)
    assert scores[0].reward == 1.0


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        (exact, None, "give a list"),
        ("exact", None, "give a list"),
        ([3], None, "3 is neither a function nor the name of a classifier"),
        ([exact, exact], None, "not all different"),
        ([exact, brevity], [1.0], r"reward_weights=\[1.0\]"),
        ([exact], [math.inf], r"at most 1e\+30"),
        ([exact], [math.nan], r"at most 1e\+30"),
        ([exact], [-1e31], r"at most 1e\+30"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(functions, weights, message):
    with pytest.raises(ConfigError, match=message):
        RewardFunctions(functions, weights)


def test_a_reward_that_cannot_take_the_columns_is_refused_before_it_runs():
    with pytest.raises(ConfigError, match=r"<lambda> cannot be called with .*answer.*\*\*kwargs"):
        RewardFunctions([lambda completions: []]).check_signatures(BATCH.columns)


def test_i7_a_parameter_that_is_no_column_is_told_with_the_columns_there_are():
    def correct(completions, anwser, bonus=0.1, **kwargs):
        return []

    told = "correct takes 'anwser', which is not a column.*; did you mean answer\\? the columns are: prompt, answer$"
    with pytest.raises(ConfigError, match=told):
        RewardFunctions([correct]).check_signatures(BATCH.columns)

    def of_one(prompt, completions):
        return []

    with pytest.raises(ConfigError, match=r"of_one takes 'prompt', and rewards get lists .*: name it prompts$"):
        RewardFunctions([of_one]).check_signatures(BATCH.columns)


@pytest.mark.parametrize("returned", [itertools.repeat(1.0), iter(int, 1)])
async def test_i9_a_reward_without_end_is_too_many(returned):
    """It ate memory for as long as the worker ran."""

    def reward(completions, **kwargs):
        return returned

    with pytest.raises(RewardError, match="reward returned more than 2 rewards for 2 completions"):
        await RewardFunctions([reward], timeout_s=5.0).score(BATCH)


@pytest.mark.parametrize(
    "returned", [{0: 1.0, 1: 2.0}, {0: 1}.keys(), "10", b"10", bytearray(b"10"), {0.0, 1.0}, frozenset({0.0, 1.0})]
)
async def test_i9_what_is_not_a_list_is_no_reward(returned):
    """A dict trained on its keys, and "10" on 1.0 and 0.0."""

    def reward(completions, **kwargs):
        return returned

    with pytest.raises(RewardError, match=f"not a list of numbers: it is a {type(returned).__name__}"):
        await RewardFunctions([reward]).score(BATCH)


@pytest.mark.parametrize("name", ["caf\udce9", "", 3, type("Name", (str,), {})("x")])
def test_i9_a_reward_whose_name_cannot_be_sent_is_refused_at_the_start(name):
    class Named:
        __name__ = name

        def __call__(self, completions, **kwargs):
            return [0.0] * len(completions)

    with pytest.raises(ConfigError, match=r"the name .* of a reward is not text that UTF-8 can write"):
        RewardFunctions([Named()])
