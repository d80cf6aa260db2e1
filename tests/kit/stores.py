"""Makes stores of every kind, and changes of every kind to put into them."""

from __future__ import annotations

from pathlib import Path

from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import Server
from slipstream.rollout_queue import store as stores
from slipstream.rollout_queue.ledger.records import (
    EvalRecord,
    RowRecord,
    RunState,
    ServerRecord,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.store.base import Store
from slipstream.rollout_queue.store.changes import Changes, Payload
from tests.kit.config import config
from tests.kit.postgres import cluster


def with_store(kind: str, folder: Path) -> RunConfig:
    """Return a run file that names a store in which nothing is yet. Skips the test where the store cannot be had."""
    store = cluster().new_database() if kind == "postgresql" else kind
    return config(run={"dir": str(folder)}, queue={"store": store})


def active(run_config: RunConfig) -> Store:
    """Open the store of a run file as the active queue."""
    store = stores.build(run_config)
    assert store.acquire() is None
    return store


def in_every_table(tickets: int, pruned_below: int) -> Changes:
    """Return changes that put something into every table.

    Args:
        tickets: Number of training tickets.
        pruned_below: Those with an index below it become sums; the others have a payload of 5,000 bytes.
    """
    return Changes(
        tickets={f"{index}.0": TicketRecord(index, 0, index, "w", 0, TicketState.READY) for index in range(tickets)},
        payloads={f"{index}.0": Payload.of(bytes([index]) * 5000) for index in range(pruned_below, tickets)},
        run=RunState(version=9, step=8, session=1, id="run-x", pruned_below=pruned_below),
        prune_below=pruned_below,
        servers={"a": ServerRecord(Server("a", "http://a"))},
        evaluations={4: EvalRecord(4, 5, 4, 8, 2, 0.5, 60.0, 1.5)},
        evaluation_tickets={(4, 1): TicketRecord(1, 0, 7, "w", 0, evaluation=4)},
        rows={3: RowRecord(3, 2, 0.5, 0.25)},
    )
