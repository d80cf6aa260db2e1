"""`slipstream ledger`: what became of every ticket of a run, for audits."""

from __future__ import annotations

import msgspec

from protocol.config import ConfigError, RunConfig
from rollout_queue.store.sqlite import FILE_NAME, MEMORY, read_ledger


def print_ledger(config: RunConfig) -> None:
    """One JSON object a line; works beside a running queue. Raises `ConfigError` where there is no ledger."""
    if config.queue.store == MEMORY:
        raise ConfigError(f'queue.store = "{MEMORY}" keeps no ledger: choose "sqlite" to be able to read it later')
    path = config.run_dir / FILE_NAME
    if not path.exists():
        raise ConfigError(f"{path}: there is no ledger; has the run's queue been started?")
    for row in read_ledger(path):
        print(msgspec.json.encode(row).decode())
