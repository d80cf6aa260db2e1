"""Serves a queue over HTTP, with a clock that moves only when a test changes it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest
import uvicorn
from fastapi import FastAPI

from slipstream.protocol.client import QueueClient, QueueRefused
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.clock import Clock
from slipstream.rollout_queue.service import listen
from slipstream.rollout_queue.store.base import Store
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit.messages import SERVER


@dataclass
class FakeTime:
    """Is the time in seconds for both of the queue's clocks."""

    now: float = 1000.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.now)


@dataclass
class Served:
    """Holds a queue that is served over real HTTP."""

    url: str
    broker: Broker
    time: FakeTime


@asynccontextmanager
async def serving(config: RunConfig, store: Store | None = None) -> AsyncIterator[Served]:
    """Serve the queue on a free port inside the context. Its clock stands still until the test changes it."""
    time = FakeTime()
    app = create_app(config, store or MemoryStore(), time.clock())
    async with listening(app) as url:
        yield Served(url, app.state.broker, time)


class _Server(uvicorn.Server):
    """Sets `up` when it has started, and leaves signals to pytest."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(uvicorn.Config(app, access_log=False, log_level="warning", timeout_graceful_shutdown=2))
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    server = _Server(app)
    with listen("127.0.0.1", 0) as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            await server.up.wait()
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                app.state.broker.close_waits()
                server.should_exit = True


async def serve_version(client: QueueClient, version: int, name: str = SERVER) -> None:
    """Tell the queue, as weight sync does, that `version` has been published to a server."""
    await move_server(client, ServerState.SYNCING, name=name)
    await move_server(client, ServerState.SERVING, version, name)


async def move_server(
    client: QueueClient, state: ServerState, version: int | None = None, name: str = SERVER, reason: str | None = None
) -> Server:
    """Tell the queue a server's state, as the newest learner does."""
    url = next(server.url for server in await client.servers() if server.name == name)
    return await client.put_server(Server(name, url, state, version, reason), (await client.position()).session)


async def refusal(call: Awaitable[object]) -> QueueRefused:
    """Return the refusal that a call to the queue ends with."""
    with pytest.raises(QueueRefused) as refused:
        await call
    return refused.value


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until the condition holds, of which nothing tells."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
