"""Keeps the ledger and the groups' payloads. `base` is the interface; the setting `queue.store` names the variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from protocol.config import RunConfig
from rollout_queue.store.base import Store
from rollout_queue.store.sqlite import FILE_NAME, MEMORY, SqliteStore

STORES: Mapping[str, Callable[[RunConfig], Store]] = {
    "sqlite": lambda config: SqliteStore(config.run_dir / FILE_NAME),
    ":memory:": lambda _: SqliteStore(MEMORY),
}


def build(config: RunConfig) -> Store:
    """Open the run's store. Raises `ConfigError` if it cannot be used."""
    return STORES[config.queue.store](config)
