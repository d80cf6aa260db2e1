"""Whether a port is free, and who has it."""

from __future__ import annotations

import errno
import shlex
import socket
from pathlib import Path

import psutil

from protocol.config import ConfigError

# Enough of a command line to know the process by.
_SHOWN = 120


def check_port(host: str, port: int, setting: str, run_file: Path, of_host: str | None = None) -> None:
    """Raises `ConfigError` where nothing could listen there. `run_file`: the one that this run's processes read;
    `of_host`: the host's setting, where it is not named as the port's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{setting} = {port}: another process listens on {host}:{port}{_described(port, run_file)}; stop "
                    f"it or choose another port"
                ) from None
            at, remedy = f"{of_host or setting.replace('port', 'host')} = {host}", "name an address of this machine"
            if port:  # else any will do
                at, remedy = f"{at}, {setting} = {port}", f"{remedy}, and a port that this user may have"
            raise ConfigError(f"{at}: cannot listen there: {error.strerror or error}; {remedy}") from None


def looks_like(command: list[str], run_file: Path) -> str | None:
    """What of Slipstream's a command line looks like, if anything."""
    if str(run_file) in command and "queue" in command:
        return "the queue of an earlier start of this run"
    if "queue" in command and any(part.endswith(("deploy.cli", "slipstream")) for part in command):
        return "the queue of another run"
    if any(part.startswith("vllm.entrypoints") or part.endswith("/vllm") for part in command):
        return "a vLLM server of an earlier start"
    return None


def _described(port: int, run_file: Path) -> str:
    """Of whoever listens on the port: process id, command line and likeness, as far as this user may see them."""
    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
        ]
        command = psutil.Process(listening[0]).cmdline() if listening else []
    except (psutil.Error, OSError):
        return ""
    if not listening:
        return ""
    likeness = looks_like(command, run_file)
    shown = shlex.join(command)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f" (process {listening[0]}: {shown}{f'; it looks like {likeness}' if likeness else ''})"
