"""Reads ranks and accelerate's settings from the environment, where launchers put them.

Some of accelerate's variables change what is computed, in a way that no run file shows. Variables that only say where
and how a process runs are used. Those that ask for another kind of training are refused. All others are removed from
the environment, with a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, KwargsHandler

from slipstream.protocol.config import ConfigError, RunConfig, adapter_checks, checks

# Names of torchrun, Intel MPI, Open MPI and MVAPICH, in the order in which accelerate looks for them.
RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
COUNT = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")

PREFIX = "ACCELERATE_"
# Variables that say where a process runs and what it logs: they change nothing but the device's own arithmetic.
HEEDED = frozenset(
    PREFIX + name
    for name in (
        *("USE_CPU", "TORCH_DEVICE", "CPU_AFFINITY", "USE_FSDP", "DEBUG_MODE", "LOG_LEVEL", "ENABLE_RICH"),
        *("NUM_PROCESSES", "DEBUG_RDV_FILE"),
    )
)
# Values that ask for nothing, as accelerate launch writes them.
NOTHING = ("", "0", "no", "none", "false", "default")
# Variables without effect: the values that ask for nothing, and the setting that decides instead.
OVERRIDDEN = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (("1",), "a step's gradient is that of learner.groups_per_step groups"),
    "ACCELERATE_MIXED_PRECISION": (("no",), "model.dtype and learner.weights_dtype say in which types it computes"),
    "FSDP_OFFLOAD_PARAMS": (("false", "False"), "the learner's weights stay on the GPUs"),
    "ACCELERATE_DYNAMO_BACKEND": (("NO", "no"), "learner.compile says whether layers are compiled"),
}
REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sequence parallelism",
}


@dataclass(frozen=True)
class RankInfo:
    """This process's position among the ranks.

    Attributes:
        rank: 0 to count - 1.
        local_rank: On its machine.
        launched: Whether torchrun, accelerate or MPI started all ranks.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    launched: bool = False


def place(environment: Mapping[str, str], ranks: int, parents: Sequence[str] = ()) -> RankInfo:
    """Find this process's position among the ranks.

    Args:
        ranks: `learner.ranks`.
        parents: Command line of the process that started this one.

    Raises:
        ConfigError: `ranks` and the launcher do not agree.
    """
    launched = int(_first(environment, COUNT) or 1)
    if launched > 1 or (launched == 1 and _first(environment, RANK) is not None):
        if ranks not in (1, launched):
            raise ConfigError(
                f"learner.ranks = {ranks}, and the launcher started WORLD_SIZE = {launched} of them: leave "
                f"learner.ranks out, or start {ranks}"
            )
        found = _first(environment, RANK)
        if found is None:
            raise ConfigError(
                f"WORLD_SIZE = {launched}, and no RANK says which of them this process is: start them with torchrun or "
                f"accelerate launch, or unset WORLD_SIZE and set learner.ranks = {launched}"
            )
        rank = int(found)
        return RankInfo(rank, launched, int(_first(environment, LOCAL_RANK) or rank), launched > 1)
    # On a CPU accelerate starts one process, whatever it is asked for, and says so through the port alone.
    asked = _asked_of_accelerate(parents)
    if ranks == 1 and asked is None and "ACCELERATE_USE_CPU" in environment and "MASTER_PORT" in environment:
        raise ConfigError(
            "accelerate launch was asked for several processes, and on a CPU starts one: name them with "
            "--num_processes on its command line, or set learner.ranks"
        )
    if asked and ranks not in (1, asked):
        raise ConfigError(
            f"learner.ranks = {ranks}, and accelerate launch was given --num_processes {asked}: leave one of them out"
        )
    return RankInfo(count=max(ranks, asked or 1))


def check_environment(environment: Mapping[str, str]) -> list[str]:
    """Return warnings about accelerate's variables that have no effect. Raises `ConfigError` for those that the
    learner cannot follow."""
    for name, what in REFUSED.items():
        if _is_true(environment.get(name)):
            raise ConfigError(
                f"{name} = {environment[name]}: the learner trains with DDP or FSDP2, not with {what}; choose one of "
                f"these with: accelerate config"
            )
    if _is_true(environment.get("ACCELERATE_USE_FSDP")) and environment.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(
            f"ACCELERATE_USE_FSDP = {environment['ACCELERATE_USE_FSDP']} with FSDP_VERSION = "
            f"{environment.get('FSDP_VERSION', '1')}: the learner shards with FSDP2 only; choose fsdp_version: 2 with: "
            f"accelerate config"
        )
    if device := environment.get("ACCELERATE_TORCH_DEVICE"):
        _check_device(device)
    warnings = [
        f"{name} = {environment[name]} has no effect: {instead}"
        for name, (nothing, instead) in OVERRIDDEN.items()
        if environment.get(name, nothing[0]) not in nothing
    ]
    others = [
        f"{name} = {environment[name]}"
        for name in _of_accelerate(environment)
        if name not in OVERRIDDEN and environment[name].lower() not in NOTHING
    ]
    if others:
        warnings.append(f"{', '.join(others)}: without effect, since the run file says what the learner computes")
    return warnings


def _of_accelerate(environment: Mapping[str, str]) -> list[str]:
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in HEEDED)


def _check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = "none"
    found = torch.accelerator.current_accelerator()
    usable = ["cpu", *([found.type] if found is not None else [])]
    if kind not in usable:
        raise ConfigError(
            f"ACCELERATE_TORCH_DEVICE = {name}: the learner cannot train there; unset it, or name a device of this "
            f"machine: {' or '.join(usable)}"
        )


def is_sharded(environment: Mapping[str, str]) -> bool:
    """Say whether accelerate's settings ask for FSDP2."""
    return _is_true(environment.get("ACCELERATE_USE_FSDP"))


def clear(environment: MutableMapping[str, str]) -> None:
    """Remove the variables that accelerate must not use: it reads some of them long after it was made."""
    for name in _of_accelerate(environment):
        del environment[name]


def check_sharded(config: RunConfig) -> None:
    """Raise `ConfigError` for settings that do not go with `learner.shard_weights`, which accelerate's FSDP stands
    for."""
    learner = config.learner.model_copy(update={"shard_weights": True})
    try:
        checks.check_sharded_optimisation(learner)
        adapter_checks.check_adapter(config.model, learner, config.lora)
    except ValueError as error:
        raise ConfigError(f"ACCELERATE_USE_FSDP = true, which stands for learner.shard_weights: {error}") from error


def accelerator(*handlers: KwargsHandler) -> Accelerator:
    """Make the learner's `Accelerator`. The environment does not change what it computes."""
    clear(os.environ)
    return Accelerator(
        mixed_precision="no",
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=list(handlers),
    )


def _first(environment: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environment[name] for name in names if name in environment), None)


def _asked_of_accelerate(parents: Sequence[str]) -> int | None:
    """Return `--num_processes` of `accelerate launch`, if that started this process."""
    named = [Path(part).name for part in parents]
    if "accelerate.commands.launch" not in named and ("accelerate", "launch") not in pairwise(named):
        return None
    for part, value in zip(parents, [*parents[1:], ""], strict=True):
        name, _, joined = part.partition("=")
        if name in ("--num_processes", "--num-processes") and (joined or value).isdigit():
            return int(joined or value)
    return None


def _is_true(value: str | None) -> bool:
    return (value or "false").lower() in ("true", "1", "yes", "y", "on")
