"""Starts the ranks: rank 0 starts the others on its own machine, or a launcher has started all of them.

Rank 0 is the process that was started: signals, terminal and exit code are its own. It notices a child that dies. A
child whose parent dies, in whatever way, finds its standard input closed and ends as well.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed
from accelerate import PartialState
from accelerate.state import AcceleratorState

from slipstream.learner.ranks import environment
from slipstream.learner.ranks.environment import RankInfo
from slipstream.learner.ranks.liveness import COME_WITHIN_S
from slipstream.learner.ranks.stopping import Stop
from slipstream.learner.ranks.team import COLLECTIVE_TIMEOUT, Team
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.import_path import python_path

# torch's annotations leave out stores and collectives.
dist: Any = torch.distributed

LOOPBACK = "127.0.0.1"

COME_WITHIN = timedelta(seconds=COME_WITHIN_S)

STDERR = 2

# Time that ranks have to read the last command and end.
ENDS_WITHIN_S = 10.0


def this_rank(config: RunConfig) -> RankInfo:
    """Find this process's rank.

    Raises:
        ConfigError: Run file and launcher do not agree, or there are fewer devices than ranks.
    """
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
    config: RunConfig, place: RankInfo, stop: Stop | None = None, say: Callable[[str], None] | None = None
) -> Iterator[Team]:
    """Lead the team on rank 0: wait until all ranks have come, and tell them to end at the end.

    Args:
        stop: Says when a signal asks for the end.
        say: Shows a line.
    """
    asked = environment.is_sharded(os.environ)
    sharded = config.learner.shard_weights or asked
    # Libraries that load or wrap models would act on it.
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


def join_team(place: RankInfo) -> tuple[Team, RunConfig]:
    """Join the team on any rank but 0. Returns it, and rank 0's run file."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    store = _launchers_store()
    team = Team(place.rank, place.count, store)
    _begin(store, place)
    shared = team.spread()
    team.sharded = shared["sharded"]
    config = RunConfig.model_validate_json(shared["config"])
    if team.alarm is not None:
        team.alarm.timeout_s = config.learner.rank_timeout_s
    return team, config


def leave_group() -> None:
    """Destroy the process group, on all ranks at the end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def with_world_size(config: RunConfig, place: RankInfo) -> RunConfig:
    """Return the run file with the number of ranks that there are."""
    learner = config.learner.model_copy(update={"ranks": place.count})
    return config.model_copy(update={"learner": learner})


@contextmanager
def _followers(count: int, port: int, team: Team) -> Iterator[None]:
    """Start the other ranks as children of this process."""
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


class Children:
    """Ranks 1 to `count` - 1, as children of this process.

    Args:
        on_lost: Called on a thread with what is known of a child that ended by itself.
    """

    def __init__(self, count: int, environment: Mapping[str, str], on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._closing = threading.Event()
        self._processes = [start_rank(rank, environment) for rank in range(1, count)]
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def close(self) -> None:
        """End them: those that have read the last command end by themselves."""
        self._closing.set()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + ENDS_WITHIN_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self, rank: int) -> None:
        """Kill one that does not answer, so that connections to it break and nobody waits for it."""
        self._processes[rank - 1].kill()

    def kill_all(self) -> None:
        """Kill all, right before this process ends: one that is stopped would not read that its pipe has closed."""
        for process in self._processes:
            process.kill()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing.is_set():
            return
        self._on_lost(f"rank {rank} of the learner (process {process.pid}) {_describe_end(code)}")


def _describe_end(code: int) -> str:
    """Say how a child ended, and where to look; a killed one has written nothing down."""
    if code >= 0:
        return f"ended with code {code}: what it wrote in the learner's log says why"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return (
            f"was ended from outside, by {name}: where nobody did that, the machine was most likely out of memory (the "
            f"kernel's log, dmesg, says so): give the learner more, or lower learner.token_budget"
        )
    if -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return f"was ended from outside, by {name}"
    return f"crashed, by {name}: what it wrote in the learner's log, if anything, says where"


def start_rank(rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command: Sequence[str] = (sys.executable, "-P", "-m", "slipstream.learner", "--rank")
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": python_path()}
    # Only rank 0 writes to the terminal.
    return subprocess.Popen(command, env={**os.environ, **environment, **own}, stdin=subprocess.PIPE, stdout=STDERR)


def _begin(store: Any, place: RankInfo) -> None:
    """Make one process group for tensors of the host, and of the GPU where there is one; accelerate uses it as it
    finds it."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.count, timeout=COLLECTIVE_TIMEOUT)
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    AcceleratorState._reset_state(reset_partial_state=True)  # it may have been made for one process before
    PartialState(cpu=not on_gpu)


def _launchers_store() -> Any:
    store, _, _ = next(dist.rendezvous("env://", timeout=COME_WITHIN))
    return store


def _own_store(count: int) -> Any:
    """Make a store on a free port that only this machine can reach. By itself its server would listen everywhere."""
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
    """Return the threads of a rank: its part of this machine's cores, and at most as many as were asked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // count, int(os.environ.get("OMP_NUM_THREADS") or cores)))


def _parent() -> list[str]:
    try:
        return list(psutil.Process(os.getppid()).cmdline())
    except (psutil.Error, OSError):
        return []
