"""The interface of a store. Calls block; the broker makes them one at a time, from one thread.

`tests/rollout_queue/store/test_store_contract.py` tests these docstrings for every store.
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from slipstream.protocol.client import QueueError
from slipstream.rollout_queue.ledger.records import RunState, StoreContents, TicketRecord, TicketState
from slipstream.rollout_queue.store.changes import Changes, Payload

# Seconds after which an active queue that has committed nothing is taken for dead. It commits at least each second.
MAX_SILENCE_S = 3.0


class StoreError(QueueError):
    """The store failed; the text names the file and the remedy. The queue stops, so that it cannot diverge from it."""


class Superseded(StoreError):
    """Another queue has become the active one on this store: nothing of the commit was stored, and nothing will be."""


class StoreSize(msgspec.Struct, frozen=True):
    """Bytes of a store on disk: the whole, and the part that is its write-ahead log."""

    bytes: int
    log_bytes: int = 0


class Store(Protocol):
    """Keeps the records of tickets, run, servers and evaluations, and payloads: groups as submitted, in bytes.

    One queue at a time is active on a store. Every start as the active one raises the store's epoch, and every commit
    checks it, so that an earlier owner that was taken for dead stores nothing more.

    Every method may raise `StoreError`. A store that others may restart or reach over a network rides out a lost
    connection by itself, for a bounded time.

    Attributes:
        blocks: Whether its calls wait for a disk or a network, and so are made in a thread.
        has_standbys: Whether another queue may become the active one while this one runs.
    """

    blocks: bool
    has_standbys: bool

    def acquire(self) -> str | None:
        """Try to become the active queue. Returns None once it is, else the URL of the queue that is active.

        An owner that has committed nothing for `MAX_SILENCE_S`, not even empty changes, is taken for dead.
        """
        ...

    def load(self) -> StoreContents:
        """Return everything that the queue keeps in memory; `StoreContents()` for a new store."""
        ...

    def commit(self, changes: Changes) -> None:
        """Store changes, all or nothing. Empty ones only show that this queue is alive.

        Records replace those before them. Tickets below `changes.prune_below` are kept as sums only. A durable store
        keeps everything committed when the process is killed. If the connection breaks in a commit, the store finds
        out whether it took effect, and repeats it if not.

        Raises:
            Superseded: Another queue is the active one. Nothing was stored.
        """
        ...

    def commit_at_once(self, changes: Changes) -> bool:
        """Store changes as `commit` does if that waits for nobody, and takes less time as a rule than handing it to a
        thread does. Return whether they are stored. It is called on the event loop.
        """
        ...

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, Payload]:
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

    def size(self) -> StoreSize:
        """Return how large the store is."""
        ...

    def give_up(self) -> None:
        """Let a call that is under way, and waits for a lost connection, fail now. Called from another thread."""
        ...

    def close(self) -> None:
        """Close the store, and let another queue become the active one. Nothing may be called afterwards."""
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


class StoreFacts(msgspec.Struct, frozen=True):
    """How a run's store stands.

    Attributes:
        place: Names it.
        layout: Its layout; None where nothing of the run is stored.
        newest_layout: The one that this release writes.
        run: How far the run is.
        queue: Names the queue that is active on it; None if none is.
    """

    place: str
    layout: int | None
    newest_layout: int
    run: RunState = RunState()
    queue: str | None = None


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

    def look(self) -> StoreFacts:
        """Return how the store stands. Raises `ConfigError` if it cannot be reached or read."""
        ...

    def copy_into(self, target: sqlite3.Connection) -> dict[str, int]:
        """Copy one state of the whole store into a new SQLite file. Return the number of rows of each table.

        Raises:
            ConfigError: It cannot be read.
            sqlite3.Error: The file cannot be written.
        """
        ...

    def set_aside(self, folder: Path) -> None:
        """Take what is stored out of the way: its files into `folder`, or under another name, with that of `folder`.

        Raises:
            ConfigError: A queue uses it, or it cannot be moved.
        """
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


def is_held(lock: Path) -> bool:
    """Tell whether a process holds a lock file. Raises `OSError` if it is there and cannot be opened."""
    if not lock.exists():
        return False
    try:
        with hold_lock_file(lock):
            return False
    except BlockingIOError:
        return True
