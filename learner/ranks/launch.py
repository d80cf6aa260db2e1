"""How the ranks find one another: rank 0 starts them on this machine, or a launcher has started all of them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed
from accelerate import PartialState
from accelerate.state import AcceleratorState

from learner.ranks import environment
from learner.ranks.children import Children
from learner.ranks.environment import Place
from learner.ranks.liveness import COME_WITHIN_S
from learner.ranks.stopping import Stop
from learner.ranks.team import COLLECTIVE_TIMEOUT, Team
from protocol.config import ConfigError, RunConfig

# torch's annotations leave out stores and collectives.
dist: Any = torch.distributed

LOOPBACK = "127.0.0.1"

COME_WITHIN = timedelta(seconds=COME_WITHIN_S)


def this_rank(config: RunConfig) -> Place:
    """This process's place among the ranks; raises `ConfigError` where run file and launcher do not agree, or there
    are fewer devices than ranks."""
    found = environment.place(os.environ, config.learner.ranks, _parent())
    devices = torch.cuda.device_count()
    if found.count > 1 and not found.launched and 0 < devices < found.count:
        raise ConfigError(
            f"learner.ranks = {found.count}, and this machine has {devices} GPU{'s' * (devices > 1)} for them: lower "
            f"it, or start ranks on several machines with accelerate launch"
        )
    return found


@contextmanager
def lead_team(
    config: RunConfig, place: Place, stop: Stop | None = None, say: Callable[[str], None] | None = None
) -> Iterator[Team]:
    """On rank 0: the team, once all have come; at the end the others are told to end. stop: who asks for the end; say:
    shows a line."""
    asked = environment.is_sharded(os.environ)
    sharded = config.learner.shard_weights or asked
    # From here on, who loads models or wraps them must not act on it.
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if place.count == 1:
        yield Team()
        return
    if asked:
        environment.check_sharded(config)
    store = _launchers_store() if place.launched else _own_store(place.count)
    team = Team(0, place.count, store, sharded, config.learner.rank_timeout_s)
    if stop is not None:
        team.guard(stop)
    if say is not None and team.alarm is not None:
        team.alarm.say = say
    try:
        with nullcontext() if place.launched else _followers(place.count, store.port, team):
            with team.waiting():
                _begin(store, place)
                team.spread({"config": config.model_dump_json(), "sharded": sharded})
            yield team
            team.end()
            leave_group()
    finally:
        team.close()


@contextmanager
def _followers(count: int, port: int, team: Team) -> Iterator[None]:
    """The other ranks, as children of this process."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})
    threads = _threads(count)
    torch.set_num_threads(threads)
    assert team.alarm is not None
    children = Children(count, shared | {"OMP_NUM_THREADS": str(threads)}, team.alarm.lost)
    team.alarm.kill, team.alarm.kill_all = children.kill, children.kill_all
    try:
        yield
    finally:
        children.close()


def join_team(place: Place) -> tuple[Team, RunConfig]:
    """On the others: the team, and rank 0's run file."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    store = _launchers_store()
    team = Team(place.rank, place.count, store)
    _begin(store, place)
    told = team.spread()
    team.sharded = told["sharded"]
    config = RunConfig.model_validate_json(told["config"])
    if team.alarm is not None:
        team.alarm.timeout_s = config.learner.rank_timeout_s
    return team, config


def leave_group() -> None:
    """At the end, on all ranks: take the group apart."""
    if dist.is_initialized():
        dist.destroy_process_group()


def with_world_size(config: RunConfig, place: Place) -> RunConfig:
    """The run file with as many ranks as there are."""
    learner = config.learner.model_copy(update={"ranks": place.count})
    return config.model_copy(update={"learner": learner})


def _begin(store: Any, place: Place) -> None:
    """One group for tensors of the host, and of the GPU where there is one; accelerate takes it as it finds it."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.count, timeout=COLLECTIVE_TIMEOUT)
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    AcceleratorState._reset_state(reset_partial_state=True)  # whoever asked for the device before stood alone
    PartialState(cpu=not on_gpu)


def _launchers_store() -> Any:
    store, _, _ = next(dist.rendezvous("env://", timeout=COME_WITHIN))
    return store


def _own_store(count: int) -> Any:
    """A store on a free port that only this machine can reach. Its server would listen everywhere by itself."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK,
        port,
        count,
        is_master=True,
        timeout=COME_WITHIN,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )


def _threads(count: int) -> int:
    """For each of the ranks that share this machine's cores, and no more than were asked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // count, int(os.environ.get("OMP_NUM_THREADS") or cores)))


def _parent() -> list[str]:
    try:
        return list(psutil.Process(os.getppid()).cmdline())
    except (psutil.Error, OSError):
        return []
