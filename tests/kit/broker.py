"""Runs a queue's broker without HTTP: messages in, messages out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from slipstream.protocol import codec
from slipstream.protocol.messages import (
    BeginSession,
    Fingerprint,
    Server,
    ServerChange,
    ServerState,
    Ticket,
    TicketRequest,
)
from slipstream.rollout_queue.broker import learner, lifecycle, workers
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.store.base import Store
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit.config import config
from tests.kit.messages import SERVER, group
from tests.kit.queue import FakeTime

URL = "http://127.0.0.1:8100"
# What a learner declares, and a worker that has found its data says.
DECLARED = Fingerprint("1", "t", "c", {})
FOUND = msgspec.structs.replace(DECLARED, rows=99, data="d", eval_rows=4, eval_data="e")


@asynccontextmanager
async def running(store: Store | None = None, **sections: dict[str, Any]) -> AsyncIterator[Broker]:
    """Run a broker with a learner session and a server that serves version 0."""
    broker = Broker(config(**sections), store or MemoryStore(), FakeTime().clock())
    async with lifecycle.running(broker):
        session = (await learner.command(broker, BeginSession(0, 0, 100, resume=False))).session
        for state, version in ((ServerState.JOINING, None), (ServerState.SYNCING, None), (ServerState.SERVING, 0)):
            await learner.put_server(broker, ServerChange(Server(SERVER, URL, state, version), session))
        try:
            yield broker
        finally:
            broker.close_waits()


async def stays() -> bool:
    """Is how a caller that does not hang up tells so."""
    return False


async def draw(broker: Broker, count: int = 1, **fields: Any) -> list[Ticket]:
    """Draw up to `count` tickets for worker w, by default without waiting."""
    reply = await workers.draw_tickets(broker, TicketRequest("w", count, **{"wait_s": 0.0, **fields}), stays)
    return [] if reply is None else reply.tickets


async def submit(broker: Broker, ticket: Ticket) -> bool:
    """Submit the group of a ticket. Returns whether it is new."""

    async def body() -> bytes:
        return codec.encode(group(ticket))

    return await workers.submit_group(broker, ticket.id, body)
