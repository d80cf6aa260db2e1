"""A lock between processes of one machine, which a dead process lets go of."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held_alone(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is made with its folder where it is missing and stays afterwards.

    Raises `BlockingIOError` if another process or another `held_alone` has it, another `OSError` if it cannot be
    written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
