"""Defines a task whose agent is a program: it multiplies two numbers twice, side by side, and compares.

The program is written for the `openai` client, and knows nothing of training.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from slipstream import Endpoint, Task

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "First factor."},
                "b": {"type": "integer", "description": "Second factor."},
            },
            "required": ["a", "b"],
        },
    },
}
MAX_TURNS = 3
# All clients share it: a client that makes its own spends 40 ms of CPU time on it, in every episode.
TLS = ssl.create_default_context()


def question(a: int, b: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Multiply {a} by {b}."}


def disagreement(other: str) -> dict[str, Any]:
    return {"role": "user", "content": f"Another time it was {other}. Once more."}


class Multiplier:
    """Holds a conversation with the model, which may use a calculator."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model
        self._messages: list[Any] = []

    async def ask(self, message: dict[str, Any]) -> str:
        """Send a message, run the model's calls, and return the text of its final answer."""
        self._messages.append(message)
        for _ in range(MAX_TURNS):
            reply = await self._client.chat.completions.create(
                model=self._model, messages=self._messages, tools=[MULTIPLY]
            )
            answer = reply.choices[0].message
            self._messages.append(answer)
            if not answer.tool_calls:
                return answer.content or ""
            for call in answer.tool_calls:
                result = calculated(call.function.arguments)
                self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ""


def calculated(arguments: str) -> str:
    """Return the calculator's answer to the JSON that the model wrote."""
    try:
        read = json.loads(arguments)
        return str(int(read["a"]) * int(read["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}"


async def agent(endpoint: Endpoint, a: int, b: int, answer: int) -> dict[str, float]:
    """Ask twice, and return the reward: 1.0 for the product, 0.5 if the two answers differed at first, else 0.0."""
    http = DefaultAsyncHttpxClient(verify=TLS)
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=http) as client:
        one, other = Multiplier(client, endpoint.model), Multiplier(client, endpoint.model)
        first, second = await asyncio.gather(one.ask(question(a, b)), other.ask(question(b, a)))
        agreed = first == second
        final = first if agreed else await one.ask(disagreement(second))
    right = final == str(answer)
    return {"reward": right * (1.0 if agreed else 0.5), "right": right, "agreed": agreed}


def number(rng: random.Random) -> int:
    """Draw a number of one to three digits, each length equally likely."""
    digits = rng.randint(1, 3)
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        a, b = number(rng), number(rng)
        found.append({"prompt": [question(a, b)], "a": a, "b": b, "answer": a * b})
    return found


task = Task(dataset=rows(4096, seed=1), agent=agent)
