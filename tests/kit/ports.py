"""Finds free ports of this machine for the processes of a test."""

from __future__ import annotations

import socket

_given: set[int] = set()


def free_port() -> int:
    """Return a port that was free a moment ago and that this function has not returned before.

    The system itself may give out the same port again.
    """
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = int(server.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port
