"""Plans the GPUs of learner and servers: who sits where, what each takes of a GPU's memory, and the transport.

1. The learner's ranks take the first GPUs, one each; each server takes as many of the others as its parallelism needs.
2. If too few are left, servers of one GPU each share them evenly.
3. If none is left, the servers share the learner's first GPU, and weights go by CUDA IPC.

A plan counts every byte that `gpu_memory` knows of, and is refused where they do not fit. Settings that the run file
leaves open are chosen from the memory that there is.

vLLM measures its memory by what is free on the whole device (vllm 0.32, `mem_utils.py` 309, `gpu_worker.py` 719), so
that any process which starts, ends or works next to it spoils the figure. A server on a shared GPU is therefore told
the size of its cache (`--kv-cache-memory-bytes`, with which vLLM does not measure), and the learner gets an upper
bound. That holds in any order of starts, also for a server that restarts next to a learner at work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

from slipstream.deploy.servers import gpu_memory
from slipstream.deploy.servers.gpu_memory import LearnerBytes, Parallelism, ServerBytes, gib
from slipstream.deploy.servers.model_shape import ModelShape
from slipstream.deploy.servers.probes import Gpu
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.sections.servers import flag_value, served_bits, size_of
from slipstream.weight_sync.transports.registry import choice

# The processes that a machine is planned for: a whole run, a server that joins one, a learner whose servers run
# elsewhere.
Part = Literal["run", "server", "learner"]

# Share of a GPU's memory that a plan gives out; vLLM's own default (vllm 0.32, `CacheConfig`).
USABLE = 0.92

# Shares of a GPU that its servers take together, without and with a learner on it, if the model's size is not known.
UNKNOWN_ALONE, UNKNOWN_BESIDE = 0.7, 0.35

# Rows that a learner takes, in tokens, the first that fits; next to a server not above the default.
ROWS = (32768, 16384, 8192, 4096, 2048)
ROWS_BESIDE = ROWS[2:]

# Sequences that a server computes at once: vLLM captures a graph for each size, and holds the logits of all.
MAX_SEQUENCES = 256

# Whole sequences that a server's cache should hold next to a learner, before the learner gets more.
ENOUGH_SEQUENCES = 16


@dataclass(frozen=True)
class Seat:
    """GPUs of one process.

    Attributes:
        entries: Its CUDA_VISIBLE_DEVICES.
        share: Share of their memory that a server, or a learner next to servers, takes; 0 for no bound.
        cache: Bytes of a server's cache on each GPU; 0: vLLM measures what is left of its share.
        counted: What it takes of a GPU by kind; None if the model's size is not known.
    """

    entries: tuple[str, ...]
    share: float = 0.0
    cache: int = 0
    counted: ServerBytes | LearnerBytes | None = None


@dataclass(frozen=True)
class DevicePlan:
    """GPUs of all processes of a run on this machine.

    Attributes:
        learner: The learner's; None if there is none here.
        servers: The servers'.
        transport: The value of `weight_sync.transport`, settled if it is "auto" and there are servers.
        peers: Whether the GPUs between which weights travel can copy to one another directly.
        unused: GPUs that nobody gets.
        chosen: Settings that the run file leaves open, by section and key.
        teacher: That of `teacher.path`, whose memory vLLM divides; None without one.
    """

    learner: Seat | None
    servers: tuple[Seat, ...]
    transport: str
    peers: bool
    unused: tuple[str, ...] = ()
    chosen: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    teacher: Seat | None = None

    def lines(self) -> Iterator[str]:
        """Describe the plan, one line for each process."""
        seats = [("learner", self.learner)] if self.learner else []
        seats += [(f"vllm-{number}", seat) for number, seat in enumerate(self.servers)]
        for name, seat in seats:
            share = f", {seat.share:.0%} of its memory" if seat.share else ""
            counted = f": {gib(seat.counted.total)} ({seat.counted})" if seat.counted else ""
            yield f"{name} on GPU {', '.join(seat.entries)}{share}{counted}"
        if self.teacher is not None:
            yield f"teacher on GPU {', '.join(self.teacher.entries)}"
        for entry in dict.fromkeys(entry for _, seat in seats for entry in seat.entries):
            if len(on_it := [name for name, seat in seats if entry in seat.entries]) > 1:
                yield f"GPU {entry} is shared by {', '.join(on_it)}: each has a fixed part of its memory"
        if self.unused:
            yield f"GPU {', '.join(self.unused)}: not used; raise vllm.count or learner.ranks"
        if self.servers:
            how = "" if self.peers else "; these GPUs do not reach one another: NCCL's P2P and SHM are off"
            yield f"weights travel by {self.transport}{how}"


class _DoesNotFit(Exception):
    """The plan needs more memory than there is."""


class _Seats(NamedTuple):
    """Seats of learner and servers. `beside`: whether servers share the learner's first GPU."""

    learner: tuple[str, ...]
    servers: list[tuple[str, ...]]
    beside: bool


def plan(found: Sequence[Gpu], config: RunConfig, shape: ModelShape | None, part: Part = "run") -> DevicePlan:
    """Plan for given GPUs.

    Args:
        found: The GPUs, at least one.
        config: The run file.
        shape: The model; None if it is not known, and then nothing is counted.
        part: The processes to plan for.

    Raises:
        ConfigError: The GPUs are too few or too small, with the figures and what would fit.
    """
    try:
        return _planned(found, config, shape, part)
    except _DoesNotFit as error:
        assert shape is not None
        remedy = next((text for text, other in _remedies(config, shape) if _fits(found, other, shape, part)), None)
        how = f"it would fit with {remedy}" if remedy else "no setting makes it fit: take a smaller model or more GPUs"
        raise ConfigError(f"{error}; {how}") from None


def _planned(found: Sequence[Gpu], config: RunConfig, shape: ModelShape | None, part: Part) -> DevicePlan:
    tensor = Parallelism.of(config.vllm.args).tensor
    if shape is not None and part != "learner" and shape.heads % tensor:
        raise ConfigError(
            f"vllm.args: --tensor-parallel-size {tensor}: the model has {shape.heads} attention heads, which vLLM "
            f"deals out evenly; take a size that divides them"
        )
    seats = _seats(found, config, part)
    transport = _transport(config, part, seats.beside) if seats.servers else config.weight_sync.transport
    named = {gpu.entry: gpu for gpu in found}
    used = {*seats.learner, *(entry for seat in seats.servers for entry in seat)}
    at_servers = {entry for seat in seats.servers for entry in seat}
    learner, servers, chosen = _sizes(seats, named, config, shape, transport)
    return DevicePlan(
        learner,
        tuple(servers),
        transport,
        not any(at_servers & set(named[entry].cut_off) for entry in seats.learner),
        tuple(entry for entry in named if entry not in used),
        chosen,
    )


def _seats(found: Sequence[Gpu], config: RunConfig, part: Part) -> _Seats:
    """Deal out the GPUs. Raises `ConfigError` if there are too few."""
    ranks = 0 if part == "server" else config.learner.ranks
    count = {"run": config.vllm.count, "server": 1, "learner": 0}[part]
    each = Parallelism.of(config.vllm.args).gpus
    entries = [gpu.entry for gpu in found]
    has = "this machine has one GPU" if len(found) == 1 else f"this machine has {len(found)} GPUs"
    if ranks > len(entries):
        raise ConfigError(f"learner.ranks = {ranks}: {has}, and each rank takes one; lower learner.ranks")
    learner, others = tuple(entries[:ranks]), entries[ranks:]
    if count * each <= len(others):
        return _Seats(learner, [tuple(others[i * each : (i + 1) * each]) for i in range(count)], False)
    if each > 1:
        of_learner = f" and a learner of {ranks}" if ranks else ""
        raise ConfigError(
            f"vllm.count = {count}: {count} servers of {each} GPUs each (vllm.args){of_learner} take "
            f"{count * each + ranks} GPUs, and {has}; lower vllm.count, the parallelism or learner.ranks"
        )
    shared = others or learner[:1]
    return _Seats(learner, [(shared[i % len(shared)],) for i in range(count)], not others)


def _transport(config: RunConfig, part: Part, beside: bool) -> str:
    """Settle `weight_sync.transport`. Raises `ConfigError` for one that these GPUs cannot carry."""
    wanted = config.weight_sync.transport
    quantised = served_bits(config.vllm.args) > 0
    if beside and quantised:
        raise ConfigError(
            "vllm.args: --quantization needs a GPU apart from the learner's, since NCCL joins no two processes on one; "
            "leave it out, or run on a machine with two"
        )
    if wanted == "auto":
        return choice(False, beside, quantised)
    if beside and wanted.startswith("nccl"):
        raise ConfigError(
            f"weight_sync.transport = {wanted}: learner and servers share a GPU here, and NCCL joins no two processes "
            f"on one; leave it at auto, which is ipc here"
        )
    if wanted == "ipc" and not beside:
        apart = "learner and servers have GPUs of their own here"
        where = "the learner is on another machine" if part == "server" else apart
        raise ConfigError(
            f"weight_sync.transport = ipc: {where}; leave it at auto, which is {choice(False, False, quantised)} here"
        )
    return wanted


def _sizes(
    seats: _Seats, named: Mapping[str, Gpu], config: RunConfig, shape: ModelShape | None, transport: str
) -> tuple[Seat | None, list[Seat], dict[tuple[str, str], Any]]:
    """Divide the memory. Raises `_DoesNotFit`."""
    if shape is None:
        together = UNKNOWN_BESIDE if seats.beside else UNKNOWN_ALONE
        shares = [together / sum(seat[0] in other for other in seats.servers) for seat in seats.servers]
        servers = [Seat(seat, share) for seat, share in zip(seats.servers, shares, strict=True)]
        return (Seat(seats.learner) if seats.learner else None), servers, {}
    chosen: dict[tuple[str, str], Any] = {}
    open_seqs = "max_num_seqs" not in config.vllm.model_fields_set
    if open_seqs and seats.servers:
        chosen["vllm", "max_num_seqs"] = MAX_SEQUENCES
        config = with_settings(config, chosen)
    learner, counted = None, None
    if seats.learner:
        row, counted = _row(seats, named, config, shape, transport)
        chosen |= row
        config = with_settings(config, row)
        learner = Seat(seats.learner, counted=counted)
    servers = [_server(seat, seats, named, config, shape, transport, counted) for seat in seats.servers]
    if learner is not None and counted is not None and seats.beside:
        total = named[seats.learner[0]].total
        left = USABLE * total - sum(server.counted.total for server in servers if server.counted)
        learner = Seat(seats.learner, round((left - counted.runtime) / total, 3), counted=counted)
    if open_seqs and servers:
        # A sequence grows as it is sampled, so that on average it takes half of its longest.
        caches = [seat.counted.cache for seat in servers if isinstance(seat.counted, ServerBytes)]
        whole = min(caches) // _sequence(config, shape)
        chosen["vllm", "max_num_seqs"] = max(1, min(MAX_SEQUENCES, 2 * whole))
    return learner, servers, chosen


def _row(
    seats: _Seats, named: Mapping[str, Gpu], config: RunConfig, shape: ModelShape, transport: str
) -> tuple[dict[tuple[str, str], Any], LearnerBytes]:
    """Choose the learner's row and its checkpointing, as far as the run file leaves them open, and count its bytes.

    Without checkpointing a step is faster than with longer rows, so that comes first. Next to servers, the first pass
    asks for caches that hold enough sequences to keep the servers busy.
    """
    learner, longest = config.learner, config.vllm.max_model_len
    is_set = learner.model_fields_set
    rows = [row for row in (ROWS_BESIDE if seats.beside else ROWS) if row >= longest] or [longest]
    if "token_budget" in is_set:
        rows = [learner.token_budget]
    ways = (learner.gradient_checkpointing,) if "gradient_checkpointing" in is_set else (False, True)
    candidates = [(row, way) for way in ways for row in rows]
    if len(ways) > 1:  # short rows are worth less than checkpointing
        candidates.sort(key=lambda one: (one[0] < min(8192, max(rows)), one[1]))
    beside = len(seats.servers) if seats.beside else 0
    room = USABLE * min(named[entry].total for entry in seats.learner)
    server = gpu_memory.server_bytes(shape, config, transport) if beside else None
    sequence = _sequence(config, shape)
    counted = [
        gpu_memory.learner_bytes(shape, config, max(row, longest), way, beside if transport == "ipc" else 0)
        for row, way in candidates
    ]
    least = min(counted, key=lambda count: count.total)
    fixed = beside * server.total if server else 0
    wanted = min(ENOUGH_SEQUENCES, config.vllm.max_num_seqs) - 1 if server else 0
    for one, count in zip(candidates, counted, strict=True):
        if count.total + fixed + beside * wanted * sequence <= room or (count is least and count.total + fixed <= room):
            found = dict(zip((("learner", "token_budget"), ("learner", "gradient_checkpointing")), one, strict=True))
            return {name: value for name, value in found.items() if name[1] not in is_set}, count
    entry, of_servers = seats.learner[0], ""
    if server:
        of_servers = f", and each of {beside} servers next to it {gib(server.total)} ({server})"
    raise _DoesNotFit(
        f"GPU {entry} has {gib(room)} to give ({USABLE:.0%} of {gib(room / USABLE)}): a rank of the learner takes "
        f"{gib(least.total)} ({least}){of_servers}"
    )


def _server(
    seat: tuple[str, ...],
    seats: _Seats,
    named: Mapping[str, Gpu],
    config: RunConfig,
    shape: ModelShape,
    transport: str,
    learner: LearnerBytes | None,
) -> Seat:
    """Size one server. Raises `_DoesNotFit`."""
    least = gpu_memory.server_bytes(shape, config, transport)
    on_it = sum(seat[0] in other for other in seats.servers)
    total = min(named[entry].total for entry in seat)
    room = (USABLE * total - (learner.total if learner and seats.beside else 0)) / on_it
    fixed = least.total - least.cache
    cache = int(room - fixed)
    arguments = config.vllm.args
    if given := flag_value(arguments, "--kv-cache-memory-bytes"):
        cache = size_of(given) or cache
    elif given := flag_value(arguments, "--gpu-memory-utilization"):
        cache = int(float(given) * total) - least.weights - least.engine
    if cache < least.cache or fixed + cache > room + 1:
        raise _DoesNotFit(
            f"a server gets {gib(room)} of GPU {', '.join(seat)} ({USABLE:.0%} of {gib(total)}"
            f"{f', shared by {on_it} servers' if on_it > 1 else ''}) and takes {gib(fixed + max(cache, least.cache))} "
            f"({_with_cache(least, max(cache, least.cache))}), where one sequence of vllm.max_model_len = "
            f"{config.vllm.max_model_len} takes {gib(least.cache)}"
        )
    shared = on_it > 1 or seats.beside
    if shared and not given:
        cache = min(cache, MAX_SEQUENCES * least.cache)
    share = (least.weights + least.engine + cache) / total
    return Seat(seat, share, cache if shared else 0, _with_cache(least, cache))


def _with_cache(counted: ServerBytes, cache: int) -> ServerBytes:
    return ServerBytes(counted.weights, counted.new_weights, counted.staging, counted.engine, cache)


def _sequence(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of the cache of one sequence of `vllm.max_model_len` on a GPU."""
    return config.vllm.max_model_len * gpu_memory.token_bytes(shape, config)


def with_settings(config: RunConfig, settings: Mapping[tuple[str, str], Any]) -> RunConfig:
    """Return the run file with other settings, by section and key."""
    sections: dict[str, dict[str, Any]] = {}
    for (section, key), value in settings.items():
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _fits(found: Sequence[Gpu], config: RunConfig, shape: ModelShape, part: Part) -> bool:
    try:
        _planned(found, config, shape, part)
    except (_DoesNotFit, ConfigError):
        return False
    return True


def _remedies(config: RunConfig, shape: ModelShape) -> Iterator[tuple[str, RunConfig]]:
    """Return changes of the run file that take less memory: of servers or learner alone first, then of both."""
    learner, vllm = config.learner, config.vllm
    at_servers: list[dict[tuple[str, str], Any]] = [{}]
    at_servers += [{("vllm", "count"): count} for count in range(vllm.count - 1, 0, -1)]
    parallel = Parallelism.of(vllm.args)
    at_servers += [
        {("vllm", "args"): [*vllm.args, "--tensor-parallel-size", str(size)]}
        for size in (2, 4, 8)
        if size > parallel.tensor and shape.heads % size == 0
    ]
    at_servers += [{("vllm", "max_model_len"): length} for length in _halves(vllm.max_model_len)]
    at_learner: list[dict[tuple[str, str], Any]] = [{}]
    if "gradient_checkpointing" in learner.model_fields_set and not learner.gradient_checkpointing:
        at_learner.append({("learner", "gradient_checkpointing"): True})
    if "token_budget" in learner.model_fields_set:
        at_learner += [{("learner", "token_budget"): row} for row in _halves(learner.token_budget)]
    if config.lora.r:  # merged weights are sent by all ranks, each its share
        at_learner += [{("learner", "ranks"): n} for n in range(learner.ranks + 1, 9)]
    elif learner.weights_dtype != "model":
        sharded: dict[tuple[str, str], Any] = {("learner", "shard_weights"): True}
        at_learner += [{("learner", "ranks"): n, **sharded} for n in range(learner.ranks + 1, 9)]
        if not learner.shard_weights:
            at_learner += [sharded] if learner.ranks > 1 else []
            at_learner.append({("learner", "optim"): "adamw_8bit"})
        adapter = {("lora", "r"): 16, **({("learner", "shard_weights"): False} if learner.shard_weights else {})}
        at_learner += [adapter, {**adapter, ("model", "load_in_4bit"): True}]
    pairs = [(one, other) for one, other in product(at_servers, at_learner) if one or other]
    for pair in sorted(pairs, key=lambda pair: bool(pair[0]) + bool(pair[1])):
        changes = pair[0] | pair[1]
        text = " and ".join(f"{section}.{key} = {toml_value(value)}" for (section, key), value in changes.items())
        other = with_settings(config, changes)
        with suppress(ValueError):  # a change that the run file's own checks refuse is none
            RunConfig.model_validate(other.model_dump(exclude_unset=True))
            yield text, other


def _halves(value: int) -> list[int]:
    return [value // power for power in (2, 4, 8) if value // power >= 1024]
