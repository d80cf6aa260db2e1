"""Derives the settings of a vLLM server on a CPU: the memory for keys and values, its blocks, and the tokens of a step.

By default vLLM takes 92 % of the machine's memory for one server on a CPU, and refuses to start if less is free
(vllm 0.32, `cpu_worker.py`), as it always is next to a learner or a second server. Its blocks have 128 tokens there,
and only whole blocks are cached: the episodes of a group would each compute a prompt of 100 tokens again. A step takes
up to 2,048 tokens, which are 5 seconds of one core for a model of 135 M, in which no other sequence moves on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from slipstream.deploy.servers.gpu_memory import GIB, gib
from slipstream.deploy.servers.model_shape import BYTES, architecture_of, checkpoint_dtype, shape_of
from slipstream.protocol.config import ConfigError, ModelSection, RunConfig
from slipstream.protocol.config.machine import fast_types
from slipstream.protocol.config.sections.servers import flag_value, has_flag

FLAG = "--kv-cache-memory-bytes"

# vLLM's own settings of the size. If the user gives one, it stays.
_FLAGS = (FLAG, "--gpu-memory-utilization")

_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

# Tokens of a block, the least that vLLM's CPU kernels are made for. One is kept back, and a sequence's last one is
# seldom full. Of 34 prompt tokens that eight episodes share, 81 % were read from the cache, and 0 % with blocks of 128.
_BLOCK_TOKENS = 32
_BLOCK_FLAG = "--block-size"

# Where configs have such a key, vLLM fits the blocks to the states of its layers.
_STATES = ("linear_", "mamba_", "ssm_", "hybrid_", "conv_")

# Operations of a step of the engine: one to two seconds of a core.
_STEP_FLOP = 1.5e11
_MIN_STEP_TOKENS, _MAX_STEP_TOKENS = 256, 4096
_STEP_FLAG = "--max-num-batched-tokens"

# Memory of a server: interpreters and libraries, and its weights in use, arriving, and being repacked.
_SERVER_BYTES = 2.0 * GIB

_SERVER_COPIES = 3

# Memory of queue, worker and learner, and the learner's weights: themselves, gradients, AdamW's two moments, the copy
# to publish.
_OTHERS_BYTES = 1.5 * GIB

_LEARNER_COPIES = 5

# Cache of a plain server, such as a teacher's.
PLAIN_CACHE_BYTES = 2 * GIB

# Share of the remaining memory that the caches may take.
_SHARE = 0.8


@dataclass(frozen=True)
class Model:
    """Sizes of a model in bytes.

    Attributes:
        weights: All weights.
        token: Keys and values of one token.
        parameters: Number of weights.
    """

    weights: int
    token: int
    parameters: int


@dataclass(frozen=True)
class Budget:
    """Size of one server's cache, in bytes.

    Attributes:
        least: One sequence of `vllm.max_model_len`; vLLM refuses to start with less.
        most: `vllm.max_num_seqs` sequences as long as episodes can be.
        room: Memory left for it next to everything else; below 0 if there is none.
    """

    least: int
    most: int
    room: int

    @property
    def size(self) -> int:
        return max(self.least, min(self.most, self.room))


def model_of(architecture: Mapping[str, Any], dtype: str) -> Model | None:
    """Compute sizes from a model's config.json; None for an architecture that is not the usual decoder."""
    shape = shape_of(architecture)
    if shape is None:
        return None
    size = BYTES[dtype]
    tokens = 2 * shape.layers * shape.key_heads * shape.head
    return Model(shape.parameters * size, tokens * size, shape.parameters)


def budget(model: Model, config: RunConfig, available: int, episode_tokens: int | None = None) -> Budget:
    """Compute one server's cache.

    Args:
        available: Bytes that all processes of the run may take together.
        episode_tokens: Tokens of the longest episode; None where only the context bounds it.
    """
    vllm = config.vllm
    given = flag_value(vllm.args, _BLOCK_FLAG)
    spare = 2 * (int(given) if given and given.isdigit() else _BLOCK_TOKENS)
    whole = (vllm.max_model_len + spare) * model.token
    episode = (min(vllm.max_model_len, episode_tokens or vllm.max_model_len) + spare) * model.token
    others = _OTHERS_BYTES + _LEARNER_COPIES * model.weights + _teacher_bytes(config)
    server = _SERVER_BYTES + _SERVER_COPIES * model.weights
    room = _SHARE * ((available - others) / vllm.count - server)
    return Budget(whole, episode * vllm.max_num_seqs, int(room))


def plain_dtype(model: ModelSection) -> str:
    """Return the type in which a plain server computes here: the checkpoint's, if this CPU multiplies in it."""
    dtype = checkpoint_dtype(model)
    return dtype if dtype is not None and dtype in fast_types(on_gpu=False) else "float32"


def _teacher_bytes(config: RunConfig) -> int:
    """Return the memory of the server of `teacher.path`; its weights count if their size is known."""
    if config.teacher.path is None:
        return 0
    path = ModelSection(path=config.teacher.path)
    model = model_of(architecture_of(path) or {}, plain_dtype(path))
    return int(_SERVER_BYTES) + PLAIN_CACHE_BYTES + (model.weights if model else 0)


def check_cache_fits(config: RunConfig) -> None:
    """Raise `ConfigError`, with the sizes, if one sequence would not fit into each server's cache."""
    model = _model(config)
    if is_set(config.vllm.args, os.environ) or model is None:
        return
    available = available_bytes()
    found = budget(model, config, available)
    if found.room < found.least:
        raise ConfigError(
            f"vllm.max_model_len = {config.vllm.max_model_len}: one sequence takes {gib(found.least)} of a server's "
            f"cache, and {gib(max(0, found.room))} is left for it on each of {config.vllm.count} servers, with "
            f"{gib(available)} of memory free and weights of {gib(model.weights)}, which a server holds "
            f"{_SERVER_COPIES} and the learner {_LEARNER_COPIES} times; lower vllm.max_model_len or vllm.count, take a "
            f"smaller model, or set the size by {FLAG} in vllm.args"
        )


def settled(config: RunConfig, episode_tokens: int | None = None) -> RunConfig:
    """Add what `vllm.args` leaves open, if the model's size is known: blocks, tokens of a step, and the cache.

    Call it once for all servers of a run: memory that one of them holds is no longer free.

    Args:
        episode_tokens: Tokens of the longest episode; None where only the context bounds it.
    """
    facts = architecture_of(config.model) or {}
    if (model := model_of(facts, config.model.dtype)) is None:
        return config
    arguments, wanted = config.vllm.args, {}
    if not has_flag(arguments, _BLOCK_FLAG) and not any(
        name.startswith(_STATES) for name in facts.get("text_config") or facts
    ):
        wanted[_BLOCK_FLAG] = _BLOCK_TOKENS
    if not has_flag(arguments, _STEP_FLAG):
        wanted[_STEP_FLAG] = _step_tokens(model, config)
    if not is_set(arguments, os.environ):
        wanted[FLAG] = budget(model, config, available_bytes(), episode_tokens).size
    flags = [text for flag, value in wanted.items() for text in (flag, str(value))]
    return config.model_copy(update={"vllm": config.vllm.model_copy(update={"args": [*arguments, *flags]})})


def described(config: RunConfig, episode_tokens: int | None) -> str:
    """Describe what `settled` has chosen, in one line."""
    arguments, vllm = config.vllm.args, config.vllm
    size = flag_value(arguments, FLAG)
    cache = f", a cache of {gib(int(size))}" if size and size.isdigit() else ""
    length = f"{episode_tokens} tokens, the longest episode" if episode_tokens else f"{vllm.max_model_len} tokens"
    block = flag_value(arguments, _BLOCK_FLAG)
    blocks = f"blocks of {block} tokens, " if block else ""
    few = ""
    if cache and (model := _model(config)) is not None:
        held = int(size or 0) // (model.token * (episode_tokens or vllm.max_model_len))
        few = f"; there is memory for {held} of that length at a time, so the others wait" * (held < vllm.max_num_seqs)
    return (
        f"servers on this CPU: {blocks}steps of at most {flag_value(arguments, _STEP_FLAG)} tokens{cache} for "
        f"{vllm.max_num_seqs} sequences of {length}{few}"
    )


def _step_tokens(model: Model, config: RunConfig) -> int:
    """Return a power of two: the tokens of a step, at least one for each sequence."""
    fitting = max(1.0, _STEP_FLOP / (2 * model.parameters))
    least = max(_MIN_STEP_TOKENS, 1 << math.ceil(math.log2(config.vllm.max_num_seqs)))
    return max(least, min(_MAX_STEP_TOKENS, 1 << int(math.log2(fitting))))


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
