"""Ports of this machine for the processes of a test."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
