"""Finds free ports of this machine for the processes of a test."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from itertools import count
from pathlib import Path
from typing import IO

# Below those that Linux (from 32768) and macOS (from 49152) give out themselves, to whoever binds port 0 or connects.
FIRST_PORT, PORTS = 20_000, 10_000
LOCKS = Path(tempfile.gettempdir()) / f"slipstream-test-ports-{os.getuid()}"

_held: list[IO[str]] = []


def free_port() -> int:
    """Return a free port that no other test gets, in any process, while this process lives."""
    LOCKS.mkdir(exist_ok=True)
    for number in count(os.getpid()):
        port = FIRST_PORT + number % PORTS
        lock = (LOCKS / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:  # another test's, or another program's
            lock.close()
            continue
        _held.append(lock)
        return port
    raise AssertionError
