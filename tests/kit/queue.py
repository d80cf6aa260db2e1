"""What the queue's tests share: a small run file, groups to hand in, a clock to turn, a served queue."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

from protocol.client import QueueClient
from protocol.config import RunConfig
from protocol.messages import Group, Rollout, Segment, Server, ServerState, Ticket, VersionSpan
from rollout_queue.broker import Broker, Clock
from rollout_queue.service import create_app, listen
from rollout_queue.store.sqlite import MEMORY, SqliteStore

SERVER = "vllm-0"


@dataclass
class FakeTime:
    now: float = 1000.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.now)


def make_config(**sections: dict[str, Any]) -> RunConfig:
    """A run file with B = 2 and groups of 2, unless told otherwise."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "tiny"},
        "task": {"path": "task.py:task"},
        "rollout": {"group_size": 2},
        "queue": {"max_staleness": 4},
        "learner": {"groups_per_step": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values)


def make_segment(versions: list[int], prompt: int = 2) -> Segment:
    """`prompt` tokens that were not sampled, then one sampled token for each of `versions`."""
    length = prompt + len(versions)
    mask = np.arange(length) >= prompt
    spans = [VersionSpan(version, prompt + i, prompt + i + 1, 0) for i, version in enumerate(versions)]
    return Segment(
        np.arange(length, dtype=np.int32), mask, np.where(mask, -0.5, 0).astype(np.float32), version_spans=spans
    )


def make_group(ticket: Ticket, versions: list[int] | None = None, rollouts: int = 2, **fields: Any) -> Group:
    """A group that the door lets in, sampled at `versions`, by default the ticket's."""
    versions = [ticket.version] * 3 if versions is None else versions
    made = [Rollout([make_segment(versions)], float(i), "stop") for i in range(rollouts)]
    values = {"worker_id": "w", "server_names": [SERVER], "started_at": 1.0, "finished_at": 2.0, **fields}
    return Group(ticket.id, ticket.index, 0, made, **values)


@dataclass
class Served:
    """A queue behind real HTTP."""

    url: str
    broker: Broker
    time: FakeTime
    store: SqliteStore = field(repr=False)


@asynccontextmanager
async def serving(config: RunConfig, store: SqliteStore | None = None) -> AsyncIterator[Served]:
    """The queue on a free port, with a clock that stands still until the test turns it."""
    time, store = FakeTime(), store or SqliteStore(MEMORY)
    app = create_app(config, store, time.clock())
    async with listening(app) as url:
        yield Served(url, app.state.broker, time, store)


class _Server(uvicorn.Server):
    """Tells when it is up; a signal is left to pytest."""

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
    """What weight sync does when it published `version`."""
    url = next(server.url for server in await client.servers() if server.name == name)
    await client.put_server(Server(name, url, ServerState.SYNCING))
    await client.put_server(Server(name, url, ServerState.SERVING, version))
