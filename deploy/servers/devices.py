"""Which GPU of this machine a server and a learner get, how much of its memory, and how weights travel between them.

1. The learner's ranks take the first GPUs, one each; the servers the others, as many each as vLLM's parallelism takes.
2. Where there are fewer others than that, servers of one GPU each share them evenly.
3. Where there are none, the servers share the learner's first GPU, and weights go by CUDA IPC.

A server leaves room on its GPU for weights that arrive, twice their size; beside the learner it gets `BESIDE_LEARNER`.
What the user sets stays: CUDA_VISIBLE_DEVICES says which GPUs there are, `vllm.args` override every share.

Which cores the vLLM servers get on a CPU machine, and which the other processes.

Left to the scheduler, a server's processes take cores from the learner while they wait for one another; on two
cores a step then takes 1.4 times as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.servers import kv_cache, probes
from deploy.servers.probes import Gpu
from protocol.config import ConfigError, RunConfig
from weight_sync.transports.registry import choice

# Of a GPU's memory: what servers may take together, alone on it and beside a learner.
ALONE, BESIDE_LEARNER = 0.9, 0.35

# Weights that arrive and the model that is built of them, in weights.
_ARRIVING = 2

# For a model whose size is not known before it is loaded.
_ROOM_UNKNOWN = 0.2

# Environment of a server that the launcher starts.
SHARE = "SLIPSTREAM_GPU_SHARE"

_NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}

_PARALLEL = ({"--tensor-parallel-size", "-tp"}, {"--pipeline-parallel-size", "-pp"}, {"--data-parallel-size", "-dp"})

_GIB = 1024**3


@dataclass(frozen=True)
class Seat:
    """Entries of CUDA_VISIBLE_DEVICES, and a server's share of their memory; 0 where it has none of its own."""

    entries: tuple[str, ...]
    share: float = 0.0


@dataclass(frozen=True)
class DevicePlan:
    """transport: what `weight_sync.transport` comes to. peers: whether the GPUs between which weights travel reach one
    another."""

    learner: Seat
    servers: tuple[Seat, ...]
    transport: str
    peers: bool

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"learner on GPU {', '.join(self.learner.entries)}"
        for number, seat in enumerate(self.servers):
            yield f"vllm-{number} on GPU {', '.join(seat.entries)}, {seat.share:.0%} of its memory"
        how = "" if self.peers else "; these GPUs do not reach one another: NCCL's P2P and SHM are off"
        yield f"weights travel by {self.transport}{how}"


def here(config: RunConfig, cpu: bool) -> DevicePlan | None:
    """The plan for this machine. None: its vLLM is the one for CPUs, it has no GPU, or the servers run elsewhere.
    Raises `ConfigError`."""
    if cpu or config.vllm.servers:
        return None
    found = probes.visible_gpus()
    return plan(found, config, kv_cache.weights_bytes(config)) if found else None


def plan(found: Sequence[Gpu], config: RunConfig, weights: int | None) -> DevicePlan:
    """found: at least one. weights: bytes of the model as it is served, if known. Raises `ConfigError`."""
    ranks, count, each = config.learner.ranks, config.vllm.count, gpus_of_server(config.vllm.args)
    entries = [gpu.entry for gpu in found]
    if ranks > len(entries):
        raise ConfigError(f"learner.ranks = {ranks}: {_has(found)}, and each rank takes one; lower learner.ranks")
    learner, others = entries[:ranks], entries[ranks:]
    if count * each <= len(others):
        seats = [tuple(others[i * each : (i + 1) * each]) for i in range(count)]
    elif each > 1:
        raise ConfigError(
            f"vllm.count = {count}: {count} servers of {each} GPUs each (vllm.args) and a learner of {ranks} take "
            f"{count * each + ranks} GPUs, and {_has(found)}; lower vllm.count, the parallelism or learner.ranks"
        )
    else:
        shared = others or learner[:1]
        seats = [(shared[i % len(shared)],) for i in range(count)]
    beside = not others
    named = {gpu.entry: gpu for gpu in found}
    shares = [_share(seats, seat, named, beside, weights) for seat in seats]
    transport = _transport(config, beside)
    cut_off = {entry for seat in seats for entry in seat} & set(named[learner[0]].cut_off)
    return DevicePlan(
        Seat(tuple(learner)),
        tuple(Seat(seat, share) for seat, share in zip(seats, shares, strict=True)),
        transport,
        not cut_off,
    )


def settled(config: RunConfig, planned: DevicePlan | None, cpu: bool) -> RunConfig:
    """With what "auto" comes to of `weight_sync.transport` and `peer_access`, for all processes of the run; as it is
    where the servers run elsewhere, since each says then what it has."""
    if planned is not None:
        peers = "off" if config.weight_sync.peer_access == "auto" and not planned.peers else None
        update = {"transport": planned.transport} | ({"peer_access": peers} if peers else {})
    elif config.weight_sync.transport == "auto" and not config.vllm.servers:
        update = {"transport": choice(cpu, shares_gpu=False, quantised=is_quantised(config.vllm.args))}
    else:
        return config
    return config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update=update)})


def settle(config: RunConfig, cpu: bool, say: Callable[[str], None]) -> tuple[DevicePlan | None, RunConfig]:
    """The plan for this machine, told by `say`, and `settled`. Raises `ConfigError`."""
    planned = here(config, cpu)
    for line in planned.lines() if planned is not None else ():
        say(line)
    return planned, settled(config, planned, cpu)


def environment_of(seat: Seat) -> dict[str, str]:
    """For a process that the launcher starts."""
    share = {SHARE: f"{seat.share:.3f}"} if seat.share else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(seat.entries), **share}


def seat_of(planned: DevicePlan | None, index: int, environment: Mapping[str, str]) -> Seat | None:
    """Of the server number `index` in its own process: the launcher's, or by the plan for this machine."""
    if share := environment.get(SHARE):
        return Seat((), float(share))
    return planned.servers[index] if planned is not None and index < len(planned.servers) else None


def nccl_environment(config: RunConfig) -> dict[str, str]:
    """At both ends, before NCCL is first used: it reads them once in a process (trl#5865)."""
    return dict(_NO_PEERS) if config.weight_sync.peer_access == "off" else {}


def forbid_peers(config: RunConfig) -> None:
    """`nccl_environment` for this process. What the user set stays."""
    for name, value in nccl_environment(config).items():
        os.environ.setdefault(name, value)


def gpus_of_server(arguments: Sequence[str]) -> int:
    """How many vLLM takes, by its command line's tensor, pipeline and data parallelism."""
    product = 1
    for flags in _PARALLEL:
        product *= int(_value(arguments, flags) or 1)
    return product


def is_quantised(arguments: Sequence[str]) -> bool:
    """Whether the servers keep weights in fewer bits than the checkpoint, by their command line."""
    return _value(arguments, {"--quantization", "-q"}) is not None


def check_quantised(config: RunConfig) -> None:
    """Raises `ConfigError` for servers that round weights where nothing allows for it."""
    if not is_quantised(config.vllm.args):
        return
    transport = config.weight_sync.transport
    if config.weight_sync.probe_tolerance == "auto":
        raise ConfigError(
            "vllm.args: --quantization rounds weights, so that the servers' log-probs differ from the learner's by "
            "more than weight_sync.probe_tolerance = auto allows; measure by how much, and set it, such as 1.0"
        )
    if transport not in ("auto", "nccl"):
        raise ConfigError(
            f"weight_sync.transport = {transport}: quantised servers (--quantization in vllm.args) take weights by "
            f"vLLM's own reload only; set weight_sync.transport = nccl, or leave out --quantization"
        )


def _transport(config: RunConfig, beside: bool) -> str:
    wanted = config.weight_sync.transport
    quantised = is_quantised(config.vllm.args)
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
        raise ConfigError(
            "weight_sync.transport = ipc: learner and servers have GPUs of their own here; leave it at auto, which is "
            "nccl_staged here"
        )
    return wanted


def _share(
    seats: Sequence[tuple[str, ...]],
    seat: tuple[str, ...],
    named: Mapping[str, Gpu],
    beside: bool,
    weights: int | None,
) -> float:
    """Of each of the seat's GPUs."""
    on_it = sum(seat[0] in other for other in seats)
    if beside:
        return BESIDE_LEARNER / on_it
    total = min(named[entry].total for entry in seat)
    arriving = _ROOM_UNKNOWN if weights is None else _ARRIVING * weights / len(seat) / total
    share = ALONE / on_it - arriving
    if weights is not None and share * total < 1.1 * weights / len(seat):
        raise ConfigError(
            f"vllm.count = {on_it}: {on_it} servers on a GPU of {total / _GIB:.0f} GiB get {max(share, 0):.0%} of it "
            f"each, beside room for new weights, and the weights alone take {weights / len(seat) / _GIB:.1f} GiB; "
            f"lower vllm.count, or spread a server with --tensor-parallel-size in vllm.args"
        )
    return share


def _value(arguments: Sequence[str], flags: set[str]) -> str | None:
    """The last that is given, as `--flag value` or `--flag=value`."""
    value = None
    for i, argument in enumerate(arguments):
        name, equals, given = argument.partition("=")
        if (name.replace("_", "-") if name.startswith("--") else name) in flags:
            value = given if equals else next(iter(arguments[i + 1 : i + 2]), None)
    return value


def _has(found: Sequence[Gpu]) -> str:
    return "this machine has one GPU" if len(found) == 1 else f"this machine has {len(found)} GPUs"


@dataclass(frozen=True)
class Placement:
    """Core numbers for all servers together and for everything else; `server_threads` for one server."""

    servers: list[int]
    others: list[int]
    server_threads: int


def place_devices(cores: list[int], servers: int) -> Placement | None:
    """Half of `cores` for the servers, the rest for the others; None where there is nothing to divide."""
    if len(cores) < 2:
        return None
    half = len(cores) // 2
    return Placement(cores[:half], cores[half:], max(1, half // max(1, servers)))
