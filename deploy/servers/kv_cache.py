"""Decides how much memory a vLLM server on a CPU gets for its keys and values.

By default vLLM takes 92 % of the machine's memory for one server on a CPU, and refuses to start if less is free
(vllm 0.32, `cpu_worker.py`), as it always is beside a learner or a second server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deploy.servers.model_shape import BYTES, architecture_of, shape_of
from protocol.config import ConfigError, RunConfig
from protocol.config.sections.servers import has_flag

FLAG = "--kv-cache-memory-bytes"

# vLLM's own settings of the size. If the user gives one, it stays.
_FLAGS = (FLAG, "--gpu-memory-utilization")

_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

GIB = 1024**3

# Tokens of vLLM's blocks on a CPU. One is kept back, and a sequence's last one is seldom full.
_BLOCK_TOKENS = 128

# Memory of a server: interpreters and libraries, and its weights in use, arriving, and being repacked.
_SERVER_BYTES = 2.0 * GIB

_SERVER_COPIES = 3

# Memory of queue, worker and learner, and the learner's weights: themselves, gradients, AdamW's two moments, the copy
# to publish.
_OTHERS_BYTES = 1.5 * GIB

_LEARNER_COPIES = 5

# Share of the remaining memory that the caches may take.
_SHARE = 0.8


@dataclass(frozen=True)
class Model:
    """Sizes of a model in bytes.

    Attributes:
        weights: All weights.
        token: Keys and values of one token.
    """

    weights: int
    token: int


@dataclass(frozen=True)
class Budget:
    """Size of one server's cache, in bytes.

    Attributes:
        least: One sequence of `vllm.max_model_len`; vLLM refuses to start with less.
        most: `vllm.max_num_seqs` such sequences.
        room: Memory left for it beside everything else; below 0 if there is none.
    """

    least: int
    most: int
    room: int

    @property
    def size(self) -> int:
        return min(self.most, max(self.least, self.room))


def model_of(architecture: Mapping[str, Any], dtype: str) -> Model | None:
    """Compute sizes from a model's config.json; None for an architecture that is not the usual decoder."""
    shape = shape_of(architecture)
    if shape is None:
        return None
    size = BYTES[dtype]
    return Model(shape.parameters * size, 2 * shape.layers * shape.key_heads * shape.head * size)


def budget(model: Model, config: RunConfig, available: int) -> Budget:
    """Compute one server's cache. `available`: bytes that all processes of the run may take together."""
    vllm = config.vllm
    sequence = (vllm.max_model_len + 2 * _BLOCK_TOKENS) * model.token
    others = _OTHERS_BYTES + _LEARNER_COPIES * model.weights
    server = _SERVER_BYTES + _SERVER_COPIES * model.weights
    room = _SHARE * ((available - others) / vllm.count - server)
    return Budget(sequence, sequence * vllm.max_num_seqs, int(room))


def check_cache_fits(config: RunConfig) -> None:
    """Raise `ConfigError`, with the sizes, if one sequence would not fit into each server's cache."""
    model = _model(config)
    if is_set(config.vllm.args, os.environ) or model is None:
        return
    available = available_bytes()
    found = budget(model, config, available)
    if found.room < found.least:
        raise ConfigError(
            f"vllm.max_model_len = {config.vllm.max_model_len}: one sequence takes {_gib(found.least)} of a server's "
            f"cache, and {_gib(max(0, found.room))} is left for it on each of {config.vllm.count} servers, with "
            f"{_gib(available)} of memory free and weights of {_gib(model.weights)}, which a server holds "
            f"{_SERVER_COPIES} and the learner {_LEARNER_COPIES} times; lower vllm.max_model_len or vllm.count, take a "
            f"smaller model, or set the size by {FLAG} in vllm.args"
        )


def sized(config: RunConfig) -> RunConfig:
    """Add the size of the cache to `vllm.args`, unless the user has set one or the model's size is unknown.

    Call it once for all servers of a run: memory that one of them holds is no longer free.
    """
    model = _model(config)
    if is_set(config.vllm.args, os.environ) or model is None:
        return config
    size = budget(model, config, available_bytes()).size
    return config.model_copy(
        update={"vllm": config.vllm.model_copy(update={"args": [*config.vllm.args, FLAG, str(size)]})}
    )


def is_set(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Tell whether the user has set the size of the cache."""
    return bool(environment.get(_VARIABLE)) or has_flag(arguments, *_FLAGS)


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup"), nodes: Path = Path("/sys/devices/system/node")) -> int:
    """Return the free memory in bytes, of the container or of the machine's largest memory node.

    vLLM counts in the same way: a server takes all its memory from one node.

    Args:
        cgroup: Folder of the container's limits.
        nodes: Folder of the memory nodes.
    """
    free = int(psutil.virtual_memory().available)
    if of_nodes := [_node_bytes(file.read_text()) for file in nodes.glob("node*/meminfo")]:
        free = min(free, max(of_nodes))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((cgroup / limit).read_text()) - int((cgroup / used).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, min(free, left))
    return free


def _node_bytes(meminfo: str) -> int:
    """Sum the free bytes of a node from lines such as "Node 0 MemFree: 11597616 kB"."""
    parts = (line.split() for line in meminfo.splitlines())
    kilobytes = {part[2].rstrip(":"): int(part[3]) for part in parts if len(part) > 3}
    kinds = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return 1024 * sum(kilobytes.get(kind, 0) for kind in kinds)


def _model(config: RunConfig) -> Model | None:
    architecture = architecture_of(config.model)
    return None if architecture is None else model_of(architecture, config.model.dtype)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
