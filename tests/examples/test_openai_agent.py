"""The openai_agent example: a program that owns its loop, and the conversations that its warm start learns from."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from slipstream import Endpoint
from tests.examples.conftest import Load
from tests.kit.worker import fake, roll

NAME = "openai_agent"

Reply = Callable[[list[dict[str, Any]]], str | dict[str, int]]


@asynccontextmanager
async def served(reply: Reply, asked: list[list[dict[str, Any]]]) -> AsyncIterator[Endpoint]:
    """An endpoint whose model answers messages with a text, or with a call of the tool with these arguments."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body["messages"])
        said = reply(body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            function = {"name": "multiply", "arguments": json.dumps(said)}
            message["tool_calls"] = [{"id": f"call-{len(asked)}", "type": "function", "function": function}]
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "key", "policy")
    finally:
        await runner.cleanup()


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
    asked: list[list[dict[str, Any]]] = []
    async with served(reply, asked) as endpoint:
        assert await load("task").agent(endpoint, a=12, b=34, answer=408) == result
    assert len(asked) == requests


async def test_a_second_thought_goes_on_in_the_first_conversation(load: Load) -> None:
    asked: list[list[dict[str, Any]]] = []
    async with served(wrong_at_first, asked) as endpoint:
        await load("task").agent(endpoint, a=12, b=34, answer=408)
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
