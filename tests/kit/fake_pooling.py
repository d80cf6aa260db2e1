"""Fakes vLLM's pooling server: `POST /classify` and `GET /v1/models`, with the answers of vLLM 0.32.

A test can ask for failures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class FakePooling:
    """Scores texts and conversations as a reward model would.

    Attributes:
        score: Returns the logits of one text, or of one conversation.
        model: Name of the model.
        answers: Status codes of the next answers. After these, answers succeed.
        raw: Body to return in place of the right one; None for the right one.
        generates: Whether this is a server that generates, which lacks the route `/classify`.
        requests: Bodies of all requests, in order.
    """

    def __init__(self, score: Callable[[Any], list[float]], model: str = "org/reward-model") -> None:
        self.score = score
        self.model = model
        self.answers: list[int] = []
        self.raw: str | None = None
        self.generates = False
        self.requests: list[dict[str, Any]] = []

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _classify(self, request: web.Request) -> web.Response:
        if self.generates:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        self.requests.append(body)
        if self.answers and (status := self.answers.pop(0)) != 200:
            return _refusal(status, "told to")
        if body["model"] != self.model:
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        if self.raw is not None:
            return web.Response(text=self.raw, content_type="application/json")
        inputs = body["input"] if "input" in body else [body["messages"]]
        data = [
            {"index": number, "label": "LABEL_0", "probs": probs, "num_classes": len(probs)}
            for number, probs in enumerate(map(self.score, inputs))
        ]
        usage = {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": 0, "prompt_tokens_details": None}
        answer = {"id": "classify-1", "object": "list", "created": 1, "model": self.model, "data": data, "usage": usage}
        return web.json_response(answer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the server inside the context, and yield its URL."""
        app = web.Application()
        app.add_routes([web.post("/classify", self._classify), web.get("/v1/models", self._models)])
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")


def _refusal(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
