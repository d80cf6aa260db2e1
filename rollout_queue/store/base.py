"""What the broker asks of a store. Calls block; the broker makes them one at a time, from one thread.

`tests/rollout_queue/test_store_contract.py` proves these docstrings for every store.

A lock between processes of one machine, which a dead process lets go of.
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
    """The store failed; its text names the file and the remedy. The queue stops rather than diverge from it."""


class Store(Protocol):
    """Ticket records, the run's and the servers' records, and payloads: the groups as they were submitted, in bytes.

    Every method may raise `StoreError`.
    """

    def load(self) -> StoreContents:
        """Everything that the queue keeps in memory; of a new store, `StoreContents()`."""
        ...

    def commit(self, decision: Decision, payloads: Mapping[str, bytes]) -> None:
        """Store a decision and new payloads by ticket id, all or nothing.

        Records replace those before them. A ticket that ends without a payload (a state outside `HOLDS_PAYLOAD`) takes
        its payload along, an evaluation that ends or is removed its rows. Tickets of indices below `run.pruned_below`
        are kept as sums only. A durable store keeps what was committed when the process is killed. Raises
        `OverflowError`, and has stored nothing, for a number that it cannot hold.
        """
        ...

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, bytes]:
        """The payloads of these tickets; those that are gone are left out."""
        ...

    def records(self, ticket_ids: Sequence[str]) -> dict[str, TicketRecord]:
        """The records of these tickets, ended ones too, by ticket id; those never issued or pruned are left out."""
        ...

    def forgotten_after(self, step: int) -> list[TicketRecord]:
        """The forgotten tickets that were trained at a step above `step`."""
        ...

    def first_forgotten_after(self, step: int) -> int | None:
        """The lowest index of those tickets."""
        ...

    def close(self) -> None:
        """Let go of the store; nothing else may be called afterwards."""
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
    """What a run has stored, read without holding the store: a queue may run on it meanwhile."""

    def exists(self) -> bool:
        """Tells whether a queue of the run has stored anything."""
        ...

    def read_ledger(self) -> list[LedgerRow]:
        """Returns every ticket of the run in the order of issue. Those that are kept as sums only are left out.

        Raises:
            ConfigError: There is no ledger, or it cannot be read.
        """
        ...

    def run_state(self) -> RunState:
        """Returns how far the run is, `RunState()` if nothing is stored. Raises `ConfigError` if it cannot be read."""
        ...


@contextmanager
def hold_lock_file(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is made with its folder where it is missing and stays afterwards.

    Raises `BlockingIOError` if another process or another `held_alone` has it, another `OSError` if it cannot be
    written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
