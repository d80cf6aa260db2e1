"""What may be an agent, and what it may return."""

import math
from functools import partial

import numpy as np
import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.agent import Agent, read_result
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.tools.function import FunctionTool
from tests.kit.agent import agent_task
from tests.kit.worker import accuracy, multiply, row, task


def fits(endpoint, prompt):
    """Takes what there is."""


def no_endpoint(prompt):
    """Could not reach the policy."""


def unknown(endpoint, anser):
    """Takes no column."""


def by_position(endpoint, prompt, /):
    """Cannot be called by names."""


async def yields(endpoint, prompt):
    yield 1.0


class Yields:
    def __call__(self, endpoint, prompt):
        yield 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": yields}, "yields yields, and an agent returns.* write return in place of yield"),
        ({"agent": partial(yields)}, "yields yields, and an agent returns"),
        ({"agent": Yields()}, "Yields yields, and an agent returns"),
        ({"agent": 3}, r"Task\(agent=3\): it cannot be called"),
        ({"agent": no_endpoint}, "no_endpoint takes no 'endpoint'"),
        ({"agent": unknown}, "takes 'anser', which is not a column of the data set; did you mean answer"),
        ({"agent": by_position}, "takes 'endpoint' by position alone"),
        ({"dataset": [row(endpoint=1)]}, "the column 'endpoint' is a name that agents already get"),
        ({"dataset": [row(agent_results=1)]}, "'agent_results' is a name that reward functions already get"),
        ({"tools": [multiply]}, r"Task\(agent=..., tools=...\): an agent runs its own loop.* leave out tools=..., or"),
        (
            {"tools": [multiply], "mcp_servers": ["http://x/mcp"]},
            r"tools=..., mcp_servers=...\): an agent runs its own loop",
        ),
        ({"environment": dict}, r"Task\(agent=..., environment=...\): an agent runs its own loop"),
        (
            {"rewards": [], "reward_weights": [1.0]},
            "no reward functions to weigh; the reward that the agent gives itself has the weight 1 and none here",
        ),
        (
            {"rewards": [accuracy], "reward_weights": [1.0, 0.5]},
            r"each of the 1 rewards=\[...\].*; the reward that the agent gives itself has the weight 1",
        ),
        ({"rewards": [accuracy, lambda completions, agent_result, **rest: []]}, "takes 'agent_result', which is not"),
    ],
)
def test_a_task_that_cannot_work_says_why(changes, message):
    with pytest.raises(ConfigError, match=message):
        agent_task(**{"agent": fits, **changes})


def test_where_tools_cannot_be_isolated_it_is_known():
    assert task().may_isolate
    assert not agent_task(fits).may_isolate
    assert not task(tools=[], rewards=[accuracy], environment=lambda: None).may_isolate
    assert not task(tools=[FunctionTool(multiply)]).may_isolate


def test_an_agent_needs_a_dataset():
    with pytest.raises(ConfigError, match=r"Task\(...\) has no dataset; give dataset="):
        Task(agent=fits)


def test_rewards_may_be_left_out_or_ask_for_what_agents_return():
    assert agent_task(fits).rewards == ()
    agent_task(fits, rewards=[lambda completions, agent_results, **rest: []])


def test_it_is_given_the_columns_that_it_names():
    columns = {"prompt": "p", "answer": 3}
    assert Agent(fits).arguments(columns) == {"prompt": "p"}
    assert Agent(lambda endpoint, **rest: None).arguments(columns) == columns


def test_its_rows_need_no_prompt_and_it_gets_none_that_they_have_not():
    rows = [{"question": "12 * 34?", "answer": 408}]
    takes_all = agent_task(lambda endpoint, **columns: None, dataset=rows)
    assert takes_all.rows.row_for(0, 0, False).columns["prompt"]
    assert Agent(takes_all.agent).arguments(takes_all.rows.row_for(0, 0, False).columns) == rows[0]
    with pytest.raises(ConfigError, match=r"fits takes 'prompt', which is not a column .* are: question, answer; it"):
        agent_task(fits, dataset=rows)


@pytest.mark.parametrize(
    ("value", "given", "reward"),
    [
        (None, None, None),
        ("text", "text", None),
        (2, 2.0, 2.0),
        (np.float32(0.5), 0.5, 0.5),
        ({"reward": True}, {"reward": 1.0}, 1.0),
        ({"reward": None, "hits": 2, "note": "\ud800"}, {"reward": None, "hits": 2.0, "note": "?"}, None),
    ],
)
def test_what_it_returns_is_read(value, given, reward):
    result = read_result(value)
    assert (result.given, result.reward) == (given, reward)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0], "returned a list; return nothing, its text, a number"),
        (math.nan, "its reward as nan; give a finite number"),
        ({"reward": math.inf}, "its reward as inf"),
        ({"reward": "1.0"}, "returned 'reward': '1.0', which is text; give a number"),
        ({"hits": [1]}, "returned 'hits': a list; give numbers and texts"),
        ({"tools/x/calls": 1}, "a metric of Slipstream's own"),
        ({str(number): number for number in range(100)}, "returned 100 numbers and 0 texts; at most 32"),
        (b"bytes", "returned a bytes"),
    ],
)
def test_what_cannot_be_read_says_what_it_was(value, words):
    with pytest.raises((TypeError, ValueError), match=words):
        read_result(value)
