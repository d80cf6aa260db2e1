"""Fakes a server with OpenAI's chat completions, for programs that own their loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Reply = Callable[[list[dict[str, Any]]], str | dict[str, Any]]


@dataclass(frozen=True)
class Request:
    authorization: str
    body: dict[str, Any]


class FakeOpenAI:
    """Answers chat completions with what `reply` returns.

    Attributes:
        reply: Maps the messages of a request to the model's reply: a text, or the arguments of a call of `multiply`.
        requests: All requests, in order.
    """

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests: list[Request] = []

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        """Return the messages of each request."""
        return [request.body["messages"] for request in self.requests]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the server inside the context, and yield its base URL."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        async with TestServer(app) as server:
            yield str(server.make_url("/v1"))

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(Request(request.headers["Authorization"], body))
        said = self.reply(body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            function = {"name": "multiply", "arguments": json.dumps(said)}
            message["tool_calls"] = [{"id": f"call-{len(self.requests)}", "type": "function", "function": function}]
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        )
