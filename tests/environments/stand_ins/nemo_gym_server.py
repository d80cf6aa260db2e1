"""Stands in for a resources server of NeMo Gym 0.4.0, which needs Python 3.12: its routes, bodies and session cookie as
`nemo_gym.base_resources_server.SimpleResourcesServer` has them."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.environments.stand_ins.sums import FLOOD, HANG_S

TOOL = {
    "type": "function",
    "name": "multiply",
    "description": "Multiply two integers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "strict": False,
}


def line(**fields: Any) -> str:
    """Return a line of its data set."""
    params = {"input": [{"role": "user", "content": "Multiply 12 by 34."}], "tools": [TOOL]}
    return json.dumps({"id": 0, "responses_create_params": params, "expected": "408", **fields})


class ResourcesServer:
    """Multiplies, and rewards an answer with the product. `fault`: what goes wrong at a call or at the verdict."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.called: list[str] = []
        # Calls by session.
        self.sessions: dict[str, int] = {}
        app = web.Application()
        for path, handler in (("/seed_session", self.seed), ("/multiply", self.multiply), ("/verify", self.verify)):
            app.router.add_post(path, handler)
        self.server = TestServer(app)

    async def __aenter__(self) -> str:
        await self.server.start_server()
        return str(self.server.make_url("")).rstrip("/")

    async def __aexit__(self, *error: object) -> None:
        await self.server.close()

    async def seed(self, request: web.Request) -> web.Response:
        session = uuid.uuid4().hex
        self.sessions[session] = 0
        response = web.json_response({})
        response.set_cookie("session", session)
        return response

    async def multiply(self, request: web.Request) -> web.Response:
        self.called.append("multiply")
        if self.fault == "hang":
            await asyncio.sleep(HANG_S)
        if self.fault == "flood":
            return web.Response(text=FLOOD)
        self.sessions[request.cookies["session"]] += 1
        given = await request.json()
        return web.json_response(given["a"] * given["b"])

    async def verify(self, request: web.Request) -> web.Response:
        given = await request.json()
        (message,) = (item for item in given["response"]["output"] if item["type"] == "message")
        text = message["content"][0]["text"]
        outputs = [item for item in given["response"]["output"] if item["type"] == "function_call_output"]
        calls = self.sessions[request.cookies["session"]]
        assert len(outputs) == calls
        reward: Any = float(given["expected"] in text)
        verdict = {**given, "reward": {"nan": float("nan"), "image": "an image"}.get(self.fault, reward)}
        return web.Response(text=json.dumps({**verdict, "calls": calls}), content_type="application/json")
