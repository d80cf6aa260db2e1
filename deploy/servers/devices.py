"""Gives the processes of a run their GPUs and CPU cores on this machine, and chooses settings that depend on them.

`device_plan` decides who gets which GPU. The user decides first: CUDA_VISIBLE_DEVICES says which GPUs there are,
`vllm.args` override what the plan gives a server, and settings that the run file has stay as they are.

On a CPU machine, servers and the other processes get half of the cores each (`place_devices`). Left to the scheduler,
processes of a server that wait for one another take cores from the learner: on two cores, a step took 1.4 times as
long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.deploy.servers import device_plan, probes
from slipstream.deploy.servers.device_plan import DevicePlan, Part, Seat, with_settings
from slipstream.deploy.servers.gpu_memory import Parallelism
from slipstream.deploy.servers.model_shape import checkpoint_dtype, fetch_architecture, model_shape
from slipstream.deploy.servers.probes import Gpu
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.machine import bfloat16_unit, fast_types
from slipstream.protocol.config.sections.base import toml_value
from slipstream.weight_sync.transports.registry import choice

# Environment variables that pass a process that the supervisor starts its share of a GPU's memory, 0 for no bound, and
# a server the bytes of its cache. learner/run.py reads the first.
SHARE, CACHE = "SLIPSTREAM_GPU_SHARE", "SLIPSTREAM_GPU_CACHE"

_NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def _planned(found: list[Gpu], config: RunConfig, part: Part) -> DevicePlan | None:
    if not found:
        return None
    taken = Parallelism.of(config.teacher.args).gpus if part == "run" and config.teacher.path else 0
    if taken >= len(found):
        raise ConfigError(
            f"teacher.path: a teacher takes GPUs of its own, {taken} here, and none of this machine's {len(found)} is "
            f"left for the run; serve it elsewhere (slipstream serve), and set teacher.url in place of teacher.path"
        )
    if part == "run" and not config.vllm.launched:
        part = "learner"
    own, others = found[len(found) - taken :], found[: len(found) - taken]
    planned = device_plan.plan(others, config, model_shape(config.model), part)
    return replace(planned, teacher=Seat(tuple(gpu.entry for gpu in own))) if own else planned


def settled(config: RunConfig, planned: DevicePlan | None, cpu: bool) -> RunConfig:
    """Replace "auto" in `weight_sync.transport` and `peer_access`, and the settings that the plan has chosen, so that
    all processes of the run agree.

    If the servers run elsewhere, "auto" stays: each server then says what it has.
    """
    if planned is not None and planned.servers:
        peers = "off" if config.weight_sync.peer_access == "auto" and not planned.peers else None
        update = {("weight_sync", "transport"): planned.transport}
        update |= {("weight_sync", "peer_access"): peers} if peers else {}
        return with_settings(config, {**update, **planned.chosen})
    if planned is not None:
        return with_settings(config, planned.chosen) if planned.chosen else config
    if config.weight_sync.transport == "auto" and config.vllm.launched:
        transport = choice(cpu, shares_gpu=False, quantised=config.served_quantised)
        return with_settings(config, {("weight_sync", "transport"): transport})
    return config


def settle(
    config: RunConfig, cpu: bool, say: Callable[[str], None], part: Part = "run"
) -> tuple[DevicePlan | None, RunConfig]:
    """Plan for this machine, describe the plan with `say`, and return it with the settled run file.

    On a GPU, and on a CPU that multiplies in bfloat16, `model.dtype` is the checkpoint's if the run file does not set
    it.

    Args:
        config: The run file.
        cpu: Whether the installed vLLM is the CPU build.
        say: Takes one line at a time.
        part: The processes to plan for. Those of a run whose servers run elsewhere are its learner.

    Returns:
        The plan, None with vLLM's CPU build or without a GPU; and the run file.

    Raises:
        ConfigError: The GPUs are too few or too small.
    """
    found = [] if cpu else probes.visible_gpus()
    config, chosen = _of_checkpoint(found, config)
    planned = _planned(found, config, part)
    for line in planned.lines() if planned is not None else ():
        say(line)
    _say_chosen({**chosen, **(planned.chosen if planned is not None else {})}, found, say)
    return planned, settled(config, planned, cpu)


def settle_learner(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """Settle the run file for a learner that a person has started by itself; one of the supervisor has been settled.

    How much of its GPU servers leave it is known only if the launcher starts none. A rank that a launcher has started
    sees the GPUs of its own node, or its own one, and is settled by the run file alone.

    Raises:
        ConfigError: The GPUs are too few or too small.
    """
    if SHARE in os.environ or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        return config
    found = probes.visible_gpus()
    config, chosen = _of_checkpoint(found, config)
    planned = _planned(found, config, "learner") if not config.vllm.launched else None
    chosen |= planned.chosen if planned is not None else {}
    _say_chosen(chosen, found, say)
    return with_settings(config, chosen)


def with_checkpoint_type(config: RunConfig, cpu: bool, say: Callable[[str], None]) -> RunConfig:
    """Choose `model.dtype` as `settle` does, and nothing else; of a hub model only if its config is here already."""
    found = [] if cpu else probes.visible_gpus()
    config, chosen = _of_checkpoint(found, config, fetch=False)
    _say_chosen(chosen, found, say)
    return config


def _of_checkpoint(
    found: list[Gpu], config: RunConfig, fetch: bool = True
) -> tuple[RunConfig, dict[tuple[str, str], Any]]:
    """Set `model.dtype` as the checkpoint's, unless the run file sets it or this machine would compute in it slowly.
    Returns what was set as well."""
    fast = fast_types(on_gpu=bool(found))
    if "dtype" in config.model.model_fields_set or not fast:
        return config, {}
    if fetch:
        fetch_architecture(config.model)
    if (dtype := checkpoint_dtype(config.model)) not in fast:
        return config, {}
    chosen: dict[tuple[str, str], Any] = {("model", "dtype"): dtype}
    return with_settings(config, chosen), chosen


def _say_chosen(chosen: Mapping[tuple[str, str], Any], found: list[Gpu], say: Callable[[str], None]) -> None:
    if chosen:
        values = (f"{section}.{key} = {toml_value(value)}" for (section, key), value in chosen.items())
        machine = "these GPUs" if found else f"this CPU, which multiplies in bfloat16 ({bfloat16_unit()})"
        say(f"chosen for this checkpoint and {machine}, as the run file leaves it open: {', '.join(values)}")


def environment_of(seat: Seat) -> dict[str, str]:
    """Return the variables of a process that the supervisor starts on these GPUs."""
    cache = {CACHE: str(seat.cache)} if seat.cache else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(seat.entries), SHARE: f"{seat.share:.3f}", **cache}


def seat_of(planned: DevicePlan | None, index: int, environment: Mapping[str, str]) -> Seat | None:
    """Return the GPUs of server `index`, called in its own process: the supervisor's choice, else the plan's."""
    if share := environment.get(SHARE):
        return Seat((), float(share), int(environment.get(CACHE) or 0))
    return planned.servers[index] if planned is not None and index < len(planned.servers) else None


def nccl_environment(config: RunConfig) -> dict[str, str]:
    """Return the variables that both ends need before they first use NCCL, which reads them once (trl#5865)."""
    return dict(_NO_PEERS) if config.weight_sync.peer_access == "off" else {}


def forbid_peers(config: RunConfig) -> None:
    """Set `nccl_environment` in this process, except variables that the user has set."""
    for name, value in nccl_environment(config).items():
        os.environ.setdefault(name, value)


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
