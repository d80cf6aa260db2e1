"""The ledger of a run, for audits: what became of every ticket."""

from __future__ import annotations

import msgspec

from protocol.config import ConfigError, RunConfig
from rollout_queue.store.sqlite import read_ledger


def print_ledger(config: RunConfig) -> None:
    path = config.run_dir / "queue.db"
    if not path.exists():
        raise ConfigError(f"{path}: there is no ledger; has the run's queue been started?")
    for row in read_ledger(path):
        print(msgspec.json.encode(row).decode())
