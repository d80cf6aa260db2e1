"""Looks at this machine before a start: free ports, installed packages, and GPUs.

A process that asks torch for the GPUs takes memory on each of them until it ends, so one of its own asks:
`python -m slipstream.deploy.servers.probes`.
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

from slipstream.protocol.config import ConfigError

# Characters of a command line to show: enough to recognise the process.
_SHOWN = 120


def check_port(host: str, port: int, setting: str, run_file: Path, of_host: str | None = None) -> None:
    """Raise `ConfigError` if a process could not listen at host and port.

    Args:
        host: Address to listen on.
        port: Port; 0 for any.
        setting: Name of the port's setting, for the message.
        run_file: The resolved run file, to recognise processes of an earlier start.
        of_host: Name of the host's setting if it is not the port's with "host".
    """
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
            if port:  # With port 0, only the host can be wrong.
                at, remedy = f"{at}, {setting} = {port}", f"{remedy}, and a port that this user may have"
            raise ConfigError(f"{at}: cannot listen there: {error.strerror or error}; {remedy}") from None


def looks_like(command: list[str], run_file: Path) -> str | None:
    """Describe the process of a run that a command line looks like; None if it looks like none."""
    if str(run_file) in command and "queue" in command:
        return "the queue of an earlier start of this run"
    if "queue" in command and any(part.endswith(("slipstream.deploy.cli", "slipstream")) for part in command):
        return "the queue of another run"
    if any(part.startswith("vllm.entrypoints") or part.endswith("/vllm") for part in command):
        return "a vLLM server of an earlier start"
    return None


def _described(port: int, run_file: Path) -> str:
    """Describe the process that listens on the port, as far as this user may see it."""
    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
        ]
        # A process that names itself leaves empty words behind.
        command = list(filter(None, psutil.Process(listening[0]).cmdline())) if listening else []
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
    """Raise `ConfigError` if `command` lacks one of `modules`; imports none of them."""
    missing = [module for module in modules if not _is_installed(module)]
    if not missing:
        return
    # The extras `cpu` and `gpu` include the learner's packages.
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

# Files of GPU drivers. Without one of them torch would find no GPU, and is not asked.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        entry: Its entry in CUDA_VISIBLE_DEVICES.
        name: Its product name.
        total: Bytes of memory.
        cut_off: Entries of the GPUs that it cannot copy to directly.
    """

    entry: str
    name: str
    total: int
    cut_off: tuple[str, ...] = ()


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use; none without a driver, or if torch sees none or does not answer."""
    if not any(path.exists() for path in _DRIVERS):
        return []
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", "slipstream.deploy.servers.probes"],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return [Gpu(**{**gpu, "cut_off": tuple(gpu["cut_off"])}) for gpu in json.loads(answer.stdout)]
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
