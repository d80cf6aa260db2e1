"""Stands in for the queue's client in memory: it gives tickets from a list and puts groups into a list."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from slipstream.protocol import reasons
from slipstream.protocol.client import QueueRefused, RunFinished
from slipstream.protocol.messages import (
    ErrorBody,
    Group,
    Server,
    ServerState,
    Ticket,
    TicketFailure,
    TicketReply,
    TicketRequest,
    WorkerReply,
    WorkerReport,
)


def serving_at(*urls: str, version: int = 0) -> list[Server]:
    """Make registry records of servers that serve `version`."""
    return [Server(f"vllm-{i}", url, ServerState.SERVING, version, changed_at=1.0) for i, url in enumerate(urls)]


def tickets_for(count: int, group_size: int = 2, version: int = 0) -> list[Ticket]:
    return [Ticket(f"t{i}", i, group_size, seed=0, version=version, expires_in_s=60.0) for i in range(count)]


class StandInQueue:
    """Finishes the run once every ticket has ended, unless `keep_open`. Set `lost` to name tickets as superseded.

    It gives tickets to a worker that it knows by a heartbeat; set `known` to false to have it forgotten. `refusal` is
    raised at a heartbeat, `gave_up` at tickets and groups.
    """

    def __init__(self, tickets: Iterable[Ticket] = (), servers: Sequence[Server] = (), keep_open: bool = False) -> None:
        self.tickets_left = deque(tickets)
        self.servers = list(servers)
        self.keep_open = keep_open
        self.groups: list[Group] = []
        self.failures: dict[str, TicketFailure] = {}
        self.reports: list[WorkerReport] = []
        self.put: list[Server] = []
        self.requests: list[TicketRequest] = []
        self.signed_off: list[str] = []
        self.lost: list[str] = []
        self.submit_error: Exception | None = None
        self.known = False
        self.refusal: QueueRefused | None = None
        self.gave_up: Exception | None = None
        self.warnings: list[str] = []
        self.issued = 0
        self.changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        ended = len(self.groups) + len(self.failures) + len(self.lost)
        return not self.keep_open and not self.tickets_left and ended >= self.issued

    async def tickets(self, request: TicketRequest) -> TicketReply:
        self.requests.append(request)
        self._check_known()
        while not self.tickets_left:
            if self.finished:
                raise RunFinished("the run is finished")
            if not set(request.serving) <= {of.name for of in self.servers if of.state is ServerState.SERVING}:
                return TicketReply([], self.servers)
            self.changed.clear()
            await self.changed.wait()
        count = min(request.max_tickets, len(self.tickets_left))
        self.issued += count
        return TicketReply([self.tickets_left.popleft() for _ in range(count)], self.servers)

    async def fail_ticket(self, ticket_id: str, failure: TicketFailure) -> None:
        self.failures[ticket_id] = failure
        self.changed.set()

    async def heartbeat(self, report: WorkerReport) -> WorkerReply:
        self.reports.append(report)
        if self.refusal is not None:
            raise self.refusal
        self.known = True
        finished = self.finished and self.issued > 0
        return WorkerReply(list(self.lost), self.servers, finished, list(self.warnings))

    async def sign_off(self, worker_id: str) -> None:
        self.signed_off.append(worker_id)

    async def submit(self, group: Group) -> bool:
        await asyncio.sleep(0)
        self._check_known()
        if self.submit_error is not None:
            raise self.submit_error
        self.groups.append(group)
        self.changed.set()
        return True

    async def put_server(self, server: Server) -> Server:
        self.put.append(server)
        return server

    def _check_known(self) -> None:
        if self.gave_up is not None:
            raise self.gave_up
        if not self.known:
            raise QueueRefused(409, ErrorBody(reasons.UNREGISTERED, "this queue does not know the worker"))
