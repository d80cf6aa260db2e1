"""The GPUs of this machine, as torch sees them, asked in a process of its own: a process that asks takes memory on each
of them until it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

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


def gpus() -> list[Gpu]:
    """Those that this process may use; none where there is no driver, or torch sees none or does not answer."""
    if not any(path.exists() for path in _DRIVERS):
        return []
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.gpus"],
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
