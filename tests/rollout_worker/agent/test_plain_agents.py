"""Agents that are a plain `def`: each has a thread for as long as its episode takes."""

import asyncio
import logging
import time

import pytest

from slipstream.rollout_worker.task.agent import max_open
from tests import kit
from tests.kit.agent import agent_task, client_of
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll

TALKATIVE = scripted(TOKENIZER, lambda text, index: "words")


async def ask_once(endpoint):
    async with client_of(endpoint) as client:
        assert (await client.ask()).status == 200


def plain(endpoint):
    """A program that works while it holds its thread."""
    asyncio.run(ask_once(endpoint))
    time.sleep(0.7)
    return 1.0


async def test_waiting_for_a_thread_is_no_part_of_the_time():
    """Five of 0.7 s, one after the other: the last begins after its time-out would have ended it."""
    config = kit.config(
        kit.WORKER,
        rollout={"group_size": 5},
        worker={"episodes": 1, "user_threads": 1, "open_episodes": 5, "episode_timeout_s": 2.5},
    )
    run = await roll(agent_task(plain), fake(TALKATIVE), config=config)
    assert run.queue.failures == {}
    assert [rollout.finish_reason for rollout in run.rollouts] == ["stop"] * 5
    assert run.worker.capacity.open == 0


async def test_no_more_are_open_than_there_are_threads():
    seen = []

    def look(worker):
        seen.append(worker.capacity.open)
        return False

    def agent(endpoint):
        asyncio.run(ask_once(endpoint))
        time.sleep(0.05)
        return 1.0

    config = kit.config(kit.WORKER, worker={"episodes": 2, "user_threads": 2})
    assert config.max_open == 16
    run = await roll(agent_task(agent), fake(TALKATIVE), tickets=5, config=config, stop_when=look)
    assert run.queue.failures == {}
    assert len(run.queue.groups) == 5
    assert max(seen) == run.worker.report().max_open == 2


async def coroutine(endpoint):
    """Needs no thread."""


@pytest.mark.parametrize(
    ("agent", "opened", "threads", "most"),
    [
        (plain, "auto", 4, 4),
        (plain, "auto", 100, 32),
        (plain, 50, 64, 50),
        (plain, 50, 8, 8),
        (coroutine, "auto", 4, 32),
    ],
)
def test_how_many_are_open_at_most(agent, opened, threads, most):
    config = kit.config(worker={"episodes": 4, "open_episodes": opened})
    assert max_open(config, agent, threads) == most


def test_a_setting_that_they_cannot_use_is_told_with_the_remedy(caplog):
    with caplog.at_level(logging.WARNING):
        max_open(kit.config(worker={"episodes": 4, "open_episodes": "auto"}), plain, 8)
        assert caplog.text == ""
        max_open(kit.config(worker={"episodes": 4, "open_episodes": 50}), plain, 8)
    assert "worker.open_episodes = 50: " in caplog.text
    assert "so only 8 episodes are open; raise worker.user_threads, or write it as async def" in caplog.text
