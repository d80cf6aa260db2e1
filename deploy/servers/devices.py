"""Plans the GPUs of learner and servers, the share of memory that each takes, and the transport between them.

1. The learner's ranks take the first GPUs, one each; each server takes as many of the others as its parallelism needs.
2. If too few are left, servers of one GPU each share them evenly.
3. If none is left, the servers share the learner's first GPU, and weights go by CUDA IPC.

A server leaves room on its GPU for arriving weights, twice their size; beside the learner it gets `BESIDE_LEARNER`.
The user decides first: CUDA_VISIBLE_DEVICES says which GPUs there are, and `vllm.args` override every share.

On a CPU machine, servers and the other processes get half of the cores each (`place_devices`). Left to the scheduler,
processes of a server that wait for one another take cores from the learner: on two cores, a step took 1.4 times as
long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.servers import kv_cache, probes
from deploy.servers.probes import Gpu
from protocol.config import ConfigError, RunConfig
from weight_sync.transports.registry import choice

# Shares of a GPU's memory that its servers take together, without and with a learner on it.
ALONE, BESIDE_LEARNER = 0.9, 0.35

# Room for arriving weights and for the model built from them, in sizes of the weights.
_ARRIVING = 2

# Share of the memory left free if the size of the model is not known before it is loaded.
_ROOM_UNKNOWN = 0.2

# Environment variable that passes its share of memory to a server that the supervisor starts.
SHARE = "SLIPSTREAM_GPU_SHARE"

_NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}

_PARALLEL = ({"--tensor-parallel-size", "-tp"}, {"--pipeline-parallel-size", "-pp"}, {"--data-parallel-size", "-dp"})

_GIB = 1024**3


@dataclass(frozen=True)
class Seat:
    """GPUs of one process.

    Attributes:
        entries: Its CUDA_VISIBLE_DEVICES.
        share: Share of their memory that a server takes; 0 for vLLM's own default.
    """

    entries: tuple[str, ...]
    share: float = 0.0


@dataclass(frozen=True)
class DevicePlan:
    """GPUs of all processes of a run.

    Attributes:
        transport: The value of `weight_sync.transport`, settled if it is "auto".
        peers: Whether the GPUs between which weights travel can copy to one another directly.
    """

    learner: Seat
    servers: tuple[Seat, ...]
    transport: str
    peers: bool

    def lines(self) -> Iterator[str]:
        """Describe the plan, one line for each process."""
        yield f"learner on GPU {', '.join(self.learner.entries)}"
        for number, seat in enumerate(self.servers):
            yield f"vllm-{number} on GPU {', '.join(seat.entries)}, {seat.share:.0%} of its memory"
        how = "" if self.peers else "; these GPUs do not reach one another: NCCL's P2P and SHM are off"
        yield f"weights travel by {self.transport}{how}"


def here(config: RunConfig, cpu: bool) -> DevicePlan | None:
    """Plan for this machine.

    Args:
        config: The run file.
        cpu: Whether the installed vLLM is the CPU build.

    Returns:
        None with vLLM's CPU build, without a GPU, or if the servers run elsewhere.

    Raises:
        ConfigError: The GPUs are too few or too small.
    """
    if cpu or config.vllm.servers:
        return None
    found = probes.visible_gpus()
    return plan(found, config, kv_cache.weights_bytes(config)) if found else None


def plan(found: Sequence[Gpu], config: RunConfig, weights: int | None) -> DevicePlan:
    """Plan for given GPUs.

    Args:
        found: The GPUs, at least one.
        config: The run file.
        weights: Bytes of the model as it is served; None if unknown.

    Raises:
        ConfigError: The GPUs are too few or too small.
    """
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
    """Replace "auto" in `weight_sync.transport` and `peer_access`, so that all processes of the run agree.

    If the servers run elsewhere, "auto" stays: each server then says what it has.
    """
    if planned is not None:
        peers = "off" if config.weight_sync.peer_access == "auto" and not planned.peers else None
        update = {"transport": planned.transport} | ({"peer_access": peers} if peers else {})
    elif config.weight_sync.transport == "auto" and not config.vllm.servers:
        update = {"transport": choice(cpu, shares_gpu=False, quantised=is_quantised(config.vllm.args))}
    else:
        return config
    return config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update=update)})


def settle(config: RunConfig, cpu: bool, say: Callable[[str], None]) -> tuple[DevicePlan | None, RunConfig]:
    """Plan for this machine, describe the plan with `say`, and return it with the settled run file.

    Raises:
        ConfigError: As `here`.
    """
    planned = here(config, cpu)
    for line in planned.lines() if planned is not None else ():
        say(line)
    return planned, settled(config, planned, cpu)


def environment_of(seat: Seat) -> dict[str, str]:
    """Return the variables of a process that the supervisor starts on these GPUs."""
    share = {SHARE: f"{seat.share:.3f}"} if seat.share else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(seat.entries), **share}


def seat_of(planned: DevicePlan | None, index: int, environment: Mapping[str, str]) -> Seat | None:
    """Return the GPUs of server `index`, called in its own process: the supervisor's choice, else the plan's."""
    if share := environment.get(SHARE):
        return Seat((), float(share))
    return planned.servers[index] if planned is not None and index < len(planned.servers) else None


def nccl_environment(config: RunConfig) -> dict[str, str]:
    """Return the variables that both ends need before they first use NCCL, which reads them once (trl#5865)."""
    return dict(_NO_PEERS) if config.weight_sync.peer_access == "off" else {}


def forbid_peers(config: RunConfig) -> None:
    """Set `nccl_environment` in this process, except variables that the user has set."""
    for name, value in nccl_environment(config).items():
        os.environ.setdefault(name, value)


def gpus_of_server(arguments: Sequence[str]) -> int:
    """Return the GPUs that a vLLM server takes, from the tensor, pipeline and data parallelism of its command line."""
    product = 1
    for flags in _PARALLEL:
        product *= int(_value(arguments, flags) or 1)
    return product


def is_quantised(arguments: Sequence[str]) -> bool:
    """Tell from their command line whether the servers keep weights in fewer bits than the checkpoint."""
    return _value(arguments, {"--quantization", "-q"}) is not None


def check_quantised(config: RunConfig) -> None:
    """Raise `ConfigError` for quantised servers if probe tolerance or transport do not allow for rounded weights."""
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
    """Return the share of memory that a server takes on each of its GPUs."""
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
    """Return the last value of a flag, given as `--flag value` or `--flag=value`."""
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
    """CPU cores of a run.

    Attributes:
        servers: Core numbers that all servers share.
        others: Core numbers of all other processes.
        server_threads: Threads of one server.
    """

    servers: list[int]
    others: list[int]
    server_threads: int


def place_devices(cores: list[int], servers: int) -> Placement | None:
    """Give half of `cores` to the servers and the rest to the other processes; None with fewer than two cores."""
    if len(cores) < 2:
        return None
    half = len(cores) // 2
    return Placement(cores[:half], cores[half:], max(1, half // max(1, servers)))
