"""Whether a port is free, and who has it.

The packages that only some processes need, and the one message where they are missing.

The GPUs of this machine, as torch sees them, asked in a process of its own: a process that asks takes memory on each
of them until it ends.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
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


LEARNER_MODULES = ("torch", "accelerate", "blake3", "matplotlib", "safetensors", "xxhash")

VLLM_MODULES = ("vllm",)


def require_modules(command: str, modules: tuple[str, ...]) -> None:
    """Raises `ConfigError` if `command` lacks one of `modules`; imports none of them."""
    missing = [module for module in modules if not _is_installed(module)]
    if not missing:
        return
    # Both of vLLM's extras hold the learner's.
    name, extra = ("cpu (or gpu)", "cpu") if "vllm" in modules else ("learner", "learner")
    raise ConfigError(
        f"{command} needs the {name} extra (not installed: {', '.join(missing)}): pip install 'slipstream-rl[{extra}]'"
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


PROBE_TIMEOUT_S = 120.0

# A driver's files: without one of them torch would find nothing, and is not asked.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


@dataclass(frozen=True)
class Gpu:
    """One of them. entry: its place in CUDA_VISIBLE_DEVICES. total: bytes of memory. cut_off: entries of the GPUs that
    it cannot copy to directly."""

    entry: str
    name: str
    total: int
    cut_off: tuple[str, ...] = ()


def visible_gpus() -> list[Gpu]:
    """Those that this process may use; none where there is no driver, or torch sees none or does not answer."""
    if not any(path.exists() for path in _DRIVERS):
        return []
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.servers.probes"],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return [Gpu(**{**told, "cut_off": tuple(told["cut_off"])}) for told in json.loads(answer.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _seen() -> list[Gpu]:
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = [entry.strip() for entry in named.split(",")] if named else [str(i) for i in range(count)]
    found = []
    for i in range(count):
        properties = torch.cuda.get_device_properties(i)
        cut_off = tuple(entries[j] for j in range(count) if j != i and not torch.cuda.can_device_access_peer(i, j))
        found.append(Gpu(entries[i], properties.name, properties.total_memory, cut_off))
    return found


if __name__ == "__main__":
    print(json.dumps([asdict(gpu) for gpu in _seen()]))
