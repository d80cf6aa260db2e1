"""The openai_agent example: a program that owns its loop, and the conversations that its warm start learns from."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slipstream import Endpoint
from tests.examples.conftest import Load
from tests.kit.fake_openai import FakeOpenAI, Reply
from tests.kit.worker import fake, roll

NAME = "openai_agent"


def honest(messages: list[dict[str, Any]]) -> str | dict[str, int]:
    """Uses the tool for the latest question, and says its result."""
    if messages[-1]["role"] == "tool":
        return str(messages[-1]["content"])
    words = messages[0]["content"].rstrip(".").split()
    return {"a": int(words[1]), "b": int(words[3])}


def wrong_at_first(messages: list[dict[str, Any]]) -> str | dict[str, int]:
    """As `honest`, but that one of the two first answers is a guess."""
    return "1" if len(messages) == 1 and messages[0]["content"] == "Multiply 34 by 12." else honest(messages)


def fond_of_nonsense(messages: list[dict[str, Any]]) -> str | dict[str, int]:
    return {"c": 1}


@pytest.mark.parametrize(
    ("reply", "result", "requests"),
    [
        (honest, {"reward": 1.0, "right": True, "agreed": True}, 4),
        (wrong_at_first, {"reward": 0.5, "right": True, "agreed": False}, 5),
        (lambda messages: "407", {"reward": 0.0, "right": False, "agreed": True}, 2),
        (fond_of_nonsense, {"reward": 0.0, "right": False, "agreed": True}, 6),
    ],
)
async def test_what_the_program_makes_of_its_models_answers(
    load: Load, reply: Reply, result: dict[str, Any], requests: int
) -> None:
    model = FakeOpenAI(reply)
    async with model.serving() as base_url:
        endpoint = Endpoint(base_url, "key", "policy")
        assert await load("task").agent(endpoint, a=12, b=34, answer=408) == result
    assert len(model.requests) == requests


async def test_a_second_thought_goes_on_in_the_first_conversation(load: Load) -> None:
    model = FakeOpenAI(wrong_at_first)
    async with model.serving() as base_url:
        await load("task").agent(Endpoint(base_url, "key", "policy"), a=12, b=34, answer=408)
    asked = model.conversations
    first = next(messages for messages in asked if len(messages) == 3)
    again = asked[-2]
    assert [message["role"] for message in again] == ["user", "assistant", "tool", "assistant", "user"]
    assert again[:3] == first
    assert again[-1]["content"] == "Another time it was 1. Once more."


def test_correct_demonstrations_answer_and_flawed_ones_do_not(load: Load) -> None:
    demonstrations, rng = load("demonstrations"), random.Random(0)

    def right(demo: Any) -> bool:
        words = demo.prompt[0]["content"].rstrip(".").split()
        return bool(demo.turns[-1]["content"] == str(int(words[1]) * int(words[3])))

    assert all(right(demonstrations.correct(rng)) for _ in range(300))
    share = sum(right(demonstrations.mixed(rng)) for _ in range(1000)) / 1000
    assert share == pytest.approx(1 - demonstrations.FLAWED_SHARE, abs=0.08)


async def test_both_conversations_are_trained(load: Load) -> None:
    """A whole worker against the fake server: a segment for each conversation, every answer in one of them."""
    done = await roll(load("task").task, fake())
    rollouts = done.rollouts
    assert rollouts
    assert all(rollout.reward == 1.0 and rollout.metrics["agreed"] == 1.0 for rollout in rollouts)
    assert all(len(rollout.segments) == 2 for rollout in rollouts)
