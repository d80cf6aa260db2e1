"""Builds tasks with agents, and a client for them that sends raw HTTP, as any client would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from slipstream.rollout_worker.task.agent import Endpoint
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit.worker import multiply, task

MULTIPLY = ToolBox([multiply]).schemas[0]
USER = {"role": "user", "content": "Multiply 12 by 34."}


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any

    @property
    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["choices"][0]["message"]
        return found

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["error"]
        return found


class Client:
    """Asks one endpoint over HTTP.

    Args:
        endpoint: The endpoint.
        session: Sends the requests.
        key: API key to use in place of the endpoint's; None for the endpoint's.
    """

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession, key: str | None = None) -> None:
        self.endpoint = endpoint
        self._session = session
        self._headers = {"Authorization": f"Bearer {endpoint.api_key if key is None else key}"}

    async def ask(self, messages: Any = (USER,), **fields: Any) -> Reply:
        """Ask for a reply to `messages`; `fields` are further fields of the request."""
        return await self.post(json.dumps({"model": self.endpoint.model, "messages": list(messages), **fields}))

    async def post(self, body: str | bytes, path: str = "/chat/completions") -> Reply:
        url = self.endpoint.base_url + path
        headers = {**self._headers, "Content-Type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as response:
            return Reply(response.status, json.loads(await response.text()))

    async def text(self, body: str, path: str) -> str:
        """Return what a request is answered with, such as a stream of events."""
        headers = {**self._headers, "Content-Type": "application/json"}
        async with self._session.post(self.endpoint.base_url + path, data=body, headers=headers) as response:
            return await response.text()

    async def get(self, path: str) -> Reply:
        async with self._session.get(self.endpoint.base_url + path, headers=self._headers) as response:
            return Reply(response.status, json.loads(await response.text()))


@asynccontextmanager
async def client_of(endpoint: Endpoint, key: str | None = None) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(endpoint, session, key)


def agent_task(agent: Callable[..., Any], **changes: Any) -> Any:
    """Make a task with this agent and no tools. Unless `changes` has rewards, the agent gives its own."""
    return task(**{"tools": (), "rewards": (), "agent": agent, **changes})


def results_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool messages that answer an assistant's calls of `multiply`."""
    found = []
    for call in message.get("tool_calls") or []:
        product = multiply(**json.loads(call["function"]["arguments"]))
        found.append({"role": "tool", "tool_call_id": call["id"], "content": str(product)})
    return found


async def gathered(*asked: Any) -> list[Reply]:
    return list(await asyncio.gather(*asked))
