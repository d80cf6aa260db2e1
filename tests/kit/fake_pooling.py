"""A fake of vLLM's pooling server: `POST /classify` and `GET /v1/models`, as vLLM 0.32 answers them, with failures that
a test asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class FakePooling:
    """`score` gives the logits of one text, or of one conversation. `answers`: status codes of the next answers, before
    it goes well; `raw`: a body to give in place of the right one; `generates`: it is a server of the other kind,
    without the route. `requests` holds the bodies."""

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
        """Its URL, while it runs."""
        app = web.Application()
        app.add_routes([web.post("/classify", self._classify), web.get("/v1/models", self._models)])
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")


def _refusal(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
