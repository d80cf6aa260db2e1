"""Fakes a vLLM server that scores prompts: `POST /v1/completions` with prompt_logprobs, `/detokenize`, `/v1/models`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


def teacher_logprob(ids: Sequence[int], place: int) -> float:
    """The log-prob of a token: it depends on the token, the one before it, and how many stand before both."""
    return -((ids[place] * 31 + ids[place - 1] * 17 + place) % 97) / 16 - 0.01


class FakeTeacher:
    """A teacher.

    Attributes:
        answers: Status codes of the next answers to completions; 0 to answer never. After these, answers succeed.
        fewer: Log-probs that an answer leaves out at its end.
        value: Replaces each log-prob; None for the right ones.
        name: Of its model.
        key: That requests must carry; None for none.
        first_id: Stands for the likeliest ids; None for the right ones.
        sequences: Those that were scored, in order.
    """

    def __init__(self, tokenizer: Any, max_model_len: int = 100_000) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.answers: list[int] = []
        self.fewer = 0
        self.value: float | None = None
        self.name = "the/teacher"
        self.key: str | None = None
        self.first_id: str | None = None
        self.sequences: list[list[int]] = []
        self.asked = 0

    async def _models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": self.name, "max_model_len": self.max_model_len}]})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"prompt": self.tokenizer.decode(body["tokens"])})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked += 1
        if body["model"] != self.name:
            return web.json_response({"error": {"message": "there is no such model"}}, status=404)
        status = self.answers.pop(0) if self.answers else 200
        if not status:
            await asyncio.Event().wait()
        if status != 200:
            return web.json_response({"error": {"message": "told to"}}, status=status)
        self.sequences += body["prompt"]
        top_k = body["prompt_logprobs"]
        choices = [self._choice(number, ids, top_k) for number, ids in enumerate(body["prompt"])]
        return web.json_response({"choices": choices[::-1]})

    def _choice(self, number: int, ids: list[int], top_k: int) -> dict[str, Any]:
        scored: list[Any] = [None]
        for place in range(1, len(ids)):
            value = teacher_logprob(ids, place) if self.value is None else self.value
            entries = {str(ids[place]): {"logprob": value, "rank": 99, "decoded_token": "x"}}
            for rank in range(1, top_k + 1):
                entries[self.first_id or str((ids[place] + rank) % 100)] = {
                    "logprob": -0.5 * rank,
                    "rank": rank,
                    "decoded_token": "x",
                }
            scored.append(entries)
        return {"index": number, "text": "x", "prompt_logprobs": scored[: len(scored) - self.fewer]}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the server inside the context, and yield its URL."""
        app = web.Application(client_max_size=2**30)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/detokenize", self._detokenize),
                web.post("/v1/completions", self._completions),
            ]
        )
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")
