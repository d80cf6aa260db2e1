"""What a worker asks of the queue, and tickets that it gives back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from protocol import reasons
from protocol.client import QueueError, QueueRefused
from protocol.messages import Group, Server, TicketFailure, TicketReply, TicketRequest, WorkerReply, WorkerReport
from rollout_worker.user_code.texts import encodable

logger = logging.getLogger(__name__)

_GIVE_BACK_S = 5.0
_SIGN_OFF_S = 2.0


class Queue(Protocol):
    """What a worker needs of `protocol.client.QueueClient`."""

    async def tickets(self, request: TicketRequest) -> TicketReply: ...
    async def fail_ticket(self, ticket_id: str, failure: TicketFailure) -> None: ...
    async def heartbeat(self, report: WorkerReport) -> WorkerReply: ...
    async def submit(self, group: Group) -> bool: ...
    async def sign_off(self, worker_id: str) -> None: ...
    async def put_server(self, server: Server) -> Server: ...


async def give_back(queue: Queue, ticket_id: str, failure: TicketFailure) -> None:
    """A ticket that gave no group. Raises `QueueError`."""
    try:
        await queue.fail_ticket(ticket_id, failure)
    except QueueRefused as refusal:
        logger.info("ticket %s was no longer ours: %s", ticket_id, refusal)


async def leave(queue: Queue, worker_id: str, ticket_ids: Sequence[str], why: str) -> None:
    """Let others have the tickets of a worker that ends, and sign off. If the queue does not answer, the tickets
    expire, and a server that drains waits until the worker's last heartbeat is old."""
    failure = TicketFailure(worker_id, reasons.WORKER_STOPPED, encodable(why))
    try:
        async with asyncio.timeout(_GIVE_BACK_S):
            await asyncio.gather(*(give_back(queue, ticket_id, failure) for ticket_id in ticket_ids))
    except (TimeoutError, QueueError) as error:
        logger.warning("%d tickets could not be given back: %s", len(ticket_ids), str(error) or "no answer")
        return
    try:
        async with asyncio.timeout(_SIGN_OFF_S):
            await queue.sign_off(worker_id)
    except (TimeoutError, QueueError) as error:
        logger.info("the worker ends without the queue's word: %s", str(error) or f"no answer within {_SIGN_OFF_S:g} s")
