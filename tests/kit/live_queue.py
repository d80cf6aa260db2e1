"""Runs a real queue behind HTTP in its own thread, with a worker that answers every ticket.

It is for the learner's tests, because the learner's loop is not an event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import torch

from slipstream.protocol import reasons
from slipstream.protocol.client import QueueClient, QueueRefused, RunFinished
from slipstream.protocol.config import RunConfig, fingerprint
from slipstream.protocol.messages import Group, Rollout, Ticket, TicketRequest, WorkerReport
from slipstream.rollout_queue import store
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.weight_sync.fleet.publications import PublishRecord
from slipstream.weight_sync.weights.snapshot import Probe
from tests.kit.fake_vllm.tokenizer import tiny_tokenizer
from tests.kit.messages import SERVER, segment
from tests.kit.queue import listening, serve_version

T = TypeVar("T")

# The queue refuses for these reasons while no session has begun, or when another has just begun.
_PASSING = (reasons.SESSION_AWAITED, reasons.UNREGISTERED, reasons.TICKET_ENDED, reasons.RUN_FINISHED)

Make = Callable[[Ticket], Group]


def of_row(ticket: Ticket, version: int | None = None) -> Group:
    """Make a group with tokens, log-probs and rewards that depend only on its row.

    Args:
        ticket: The ticket to answer.
        version: Version that sampled the tokens; None for the ticket's.
    """
    sampled = ticket.version if version is None else version
    random = np.random.default_rng(ticket.index)
    lengths = random.integers(3, 12, 2)
    segments = [
        segment((None, None, *[sampled] * int(length)), 7 * ticket.index + i) for i, length in enumerate(lengths)
    ]
    return Group(
        ticket_id=ticket.id,
        index=ticket.index,
        epoch=0,
        rollouts=[
            Rollout([of], reward, "stop")
            for of, reward in zip(segments, random.permutation([0.0, 1.0]).tolist(), strict=True)
        ],
        worker_id="w",
        server_names=[SERVER],
        started_at=1.0,
        finished_at=2.0,
    )


class LiveQueue:
    """Runs the queue and its worker while the context is open.

    Args:
        config: The run file. Its run directory holds the store.
        make: Makes the group that answers a ticket.
    """

    def __init__(self, config: RunConfig, make: Make = of_row) -> None:
        self.config = config
        self.make = make
        self.url = ""
        self.broker: Broker
        self.failure: BaseException | None = None
        self.loop = asyncio.new_event_loop()
        self._up: Future[None] = Future()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="live-queue", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._up.result(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        assert self.failure is None, f"the worker failed: {self.failure!r}"

    def call(self, work: Callable[[QueueClient], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the queue's loop with a new client, and return its result."""

        async def ask() -> T:
            async with QueueClient(self.url, patience_s=5.0) as client:
                return await work(client)

        return asyncio.run_coroutine_threadsafe(ask(), self.loop).result(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        app = create_app(self.config, store.build(self.config))
        self.broker = app.state.broker
        async with listening(app) as self.url:
            worker = asyncio.create_task(self._work())
            self._up.set_result(None)
            over = asyncio.create_task(self._over.wait())
            await asyncio.wait([worker, over], return_when=asyncio.FIRST_COMPLETED)
            for task in (worker, over):
                task.cancel()
            await asyncio.wait([worker, over])
            if not worker.cancelled():
                self.failure = worker.exception()

    async def _work(self) -> None:
        known = msgspec.structs.replace(fingerprint.of(self.config, tiny_tokenizer()), rows=1_000_000, data="made")
        async with QueueClient(self.url, patience_s=5.0) as client:
            while True:
                try:
                    await client.heartbeat(WorkerReport("w", [], fingerprint=known))
                    reply = await client.tickets(TicketRequest("w", 1, wait_s=0.5, have=[]))
                    for ticket in reply.tickets:
                        # A group must not be newer than the weights that a server has.
                        served = self.broker.fleet.served_version
                        version = ticket.version if served is None else min(ticket.version, served)
                        await client.submit(self.make(msgspec.structs.replace(ticket, version=version)))
                except RunFinished:
                    await asyncio.sleep(0.1)
                except QueueRefused as refusal:
                    if refusal.reason not in _PASSING:
                        raise
                    await asyncio.sleep(0.01)


class LivePublisher:
    """Tells the queue that its server has the published version, as weight sync does."""

    by_shares = False

    def __init__(self, queue: LiveQueue) -> None:
        self.queue = queue
        self.session: int | None = None
        self.records: list[PublishRecord] = []
        self.in_flight: int | None = None
        self.on_failure: Callable[[BaseException], None] | None = None
        self.weights: dict[str, torch.Tensor] = {}

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], probe: Probe) -> float:
        self.weights = {name: weight.clone() for name, weight in weights}
        self.queue.call(lambda client: serve_version(client, version))
        self.records.append(PublishRecord(version, 0.001, 0.002, 0.01, 0.005, 1e-6, [SERVER], {}))
        return 0.002

    def wait(self) -> None: ...

    def rank_lost(self, error: BaseException) -> None: ...


@contextmanager
def live_queue(config: RunConfig, make: Make = of_row) -> Iterator[LiveQueue]:
    with LiveQueue(config, make) as queue:
        yield queue
