"""Keeps the ledger and the groups' payloads. `base` is the interface; the setting `queue.store` names the variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from protocol.config import RunConfig
from rollout_queue.store.base import Store, StoreReader
from rollout_queue.store.memory import MemoryReader, MemoryStore
from rollout_queue.store.sqlite import SqliteStore
from rollout_queue.store.sqlite_file import FILE_NAME
from rollout_queue.store.sqlite_reader import SqliteReader


def _postgres(config: RunConfig) -> Store:
    from rollout_queue.store.postgres import PostgresStore
    from rollout_queue.store.postgres_database import Database

    return PostgresStore(Database(config.queue, config.run.name), config.queue.url)


def _postgres_reader(config: RunConfig) -> StoreReader:
    from rollout_queue.store.postgres_database import Database
    from rollout_queue.store.postgres_reader import PostgresReader

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
