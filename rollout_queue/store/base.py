"""The interface of a store. Calls block; the broker makes them one at a time, from one thread.

`tests/rollout_queue/test_store_contract.py` tests these docstrings for every store.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from protocol.client import QueueError
from rollout_queue.ledger.records import Decision, RunState, StoreContents, TicketRecord, TicketState


class StoreError(QueueError):
    """The store failed; the text names the file and the remedy. The queue stops, so that it cannot diverge from it."""


class Store(Protocol):
    """Keeps the records of tickets, run, servers and evaluations, and payloads: groups as submitted, in bytes.

    Every method may raise `StoreError`.
    """

    def load(self) -> StoreContents:
        """Return everything that the queue keeps in memory; `StoreContents()` for a new store."""
        ...

    def commit(self, decision: Decision, payloads: Mapping[str, bytes]) -> None:
        """Store a decision and new payloads by ticket id, all or nothing.

        Records replace those before them. The payload of a ticket is deleted when its state leaves `HOLDS_PAYLOAD`.
        Training tickets with an index below `run.pruned_below` are kept as sums only. Of each row of an evaluation only
        the newest ticket is kept, and none once the evaluation ends or is forgotten. A durable store keeps everything
        committed when the process is killed.

        Raises:
            OverflowError: A number is beyond what the store can hold. Nothing was stored.
        """
        ...

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the payloads of these tickets by id. Deleted ones are left out."""
        ...

    def records(self, ticket_ids: Sequence[str]) -> dict[str, TicketRecord]:
        """Return the records of these tickets by id, ended ones too. Those never issued or pruned are left out."""
        ...

    def forgotten_after(self, step: int) -> list[TicketRecord]:
        """Return the forgotten tickets that were trained at a step above `step`."""
        ...

    def first_forgotten_after(self, step: int) -> int | None:
        """Return the lowest index among the tickets of `forgotten_after`; None if there are none."""
        ...

    def close(self) -> None:
        """Close the store. Nothing may be called afterwards."""
        ...


class LedgerRow(msgspec.Struct, frozen=True):
    """One ticket, for audits.

    Attributes:
        state: `trained` whether or not its payload was deleted since.
        step: Optimiser step that trained it, if one did.
        version: Policy version that this step made.
    """

    ticket_id: str
    index: int
    state: TicketState
    reason: str | None
    step: int | None
    version: int | None

    @property
    def trained(self) -> bool:
        return self.state is TicketState.TRAINED


class StoreReader(Protocol):
    """Reads what a run has stored, without holding the store: a queue may run on it meanwhile."""

    def exists(self) -> bool:
        """Tell whether a queue of the run has stored anything."""
        ...

    def read_ledger(self) -> list[LedgerRow]:
        """Return every ticket of the run in the order of issue. Those that are kept as sums only are left out.

        Raises:
            ConfigError: There is no ledger, or it cannot be read.
        """
        ...

    def run_state(self) -> RunState:
        """Return how far the run is, `RunState()` if nothing is stored. Raises `ConfigError` if it cannot be read."""
        ...


@contextmanager
def hold_lock_file(path: Path) -> Iterator[None]:
    """Hold a lock file, which is created with its folder if missing and stays afterwards. A dead process holds none.

    Raises:
        BlockingIOError: Another process, or another `hold_lock_file`, holds it.
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
