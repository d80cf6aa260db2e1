"""Keeps the ledger and the groups' payloads. `base` is the interface; the setting `queue.store` names the variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.trained_record import RECORD_FOLDER, record_parts
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store.base import Store, StoreReader
from slipstream.rollout_queue.store.memory import MemoryReader, MemoryStore
from slipstream.rollout_queue.store.sqlite import SqliteReader, SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME


def _postgres(config: RunConfig) -> Store:
    from slipstream.rollout_queue.store.postgres_database import Database

    database = Database(config.queue, config.run.name)  # its module says what to install
    from slipstream.rollout_queue.store.postgres import PostgresStore

    return PostgresStore(database, config.queue.own_address)


def _postgres_reader(config: RunConfig) -> StoreReader:
    from slipstream.rollout_queue.store.postgres_database import Database
    from slipstream.rollout_queue.store.postgres_reader import PostgresReader

    return PostgresReader(Database(config.queue, config.run.name))


STORES: Mapping[str, Callable[[RunConfig], Store]] = {
    "sqlite": lambda config: SqliteStore(config.run_dir / FILE_NAME),
    ":memory:": lambda _: MemoryStore(),
    "postgresql": _postgres,
}


STORE_READERS: Mapping[str, Callable[[RunConfig], StoreReader]] = {
    "sqlite": lambda config: SqliteReader(config.run_dir / FILE_NAME),
    ":memory:": lambda config: MemoryReader(config.run_dir / FILE_NAME),
    "postgresql": _postgres_reader,
}


def build(config: RunConfig) -> Store:
    """Open the run's store. Raises `ConfigError` if it cannot be used."""
    return STORES[config.queue.store_kind](config)


def open_for_reading(config: RunConfig) -> StoreReader:
    """Open what the queues of the run have stored, without holding it."""
    return STORE_READERS[config.queue.store_kind](config)


class _Checkpoint(msgspec.Struct):
    """The place of a checkpoint, as its state.json says; `run` is "" in those of earlier releases."""

    version: int
    run: str = ""


def check_beside_run(config: RunConfig, stored: RunState) -> None:
    """Refuse a store that does not know of what else the run has left in its directory.

    The queue acknowledges a step before a checkpoint holds it and before the learner writes of it, so a store that has
    neither the newest checkpoint nor any step is another run's, or was lost in part.

    Raises:
        ConfigError: Names what is wrong and the remedy.
    """
    if config.queue.store_kind == ":memory:":
        return
    kept = checkpoints.complete(config.run_dir)
    if not kept:
        if stored == RunState() and (left := _left_by_steps(config.run_dir)) is not None:
            raise ConfigError(
                f"queue.store = {config.queue.store}: it is empty, beside {left}, which tells of steps of this run; "
                f"put the run's own store or a backup of it there, or move {config.run_dir} away to begin again, or "
                f"choose another run.name"
            )
        return
    newest = kept[max(kept)]
    if stored == RunState():
        fault = "is empty"
    else:
        # No learner has begun yet: a new ledger, begun by `slipstream queue new`.
        if not stored.session:
            return
        try:
            found = msgspec.json.decode((newest / checkpoints.STATE).read_bytes(), type=_Checkpoint)
        except (OSError, msgspec.DecodeError):
            return  # the learner says which checkpoint it takes instead
        if found.run and found.run != stored.id:
            fault = f"is that of another run, {stored.id}, not of {found.run}"
        elif found.version > stored.version:
            fault = f"has lost what came after version {stored.version}, and the checkpoint has version {found.version}"
        else:
            return
    raise ConfigError(
        f"queue.store = {config.queue.store}: it {fault}, beside {newest}; put the run's own store or a backup of it "
        f"there, or begin a new ledger, which has rows trained once more, with slipstream queue new run.toml"
    )


def _left_by_steps(run_dir: Path) -> Path | None:
    """Return a file that only a run which has trained leaves in its directory; None if there is none."""
    record = run_dir / RECORD_FOLDER
    found = [run_dir / "metrics.jsonl", *(record_parts(record) if record.is_dir() else [])]
    return next((path for path in found if path.is_file() and path.stat().st_size), None)
