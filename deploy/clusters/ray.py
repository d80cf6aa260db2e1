"""Runs a run on a Ray cluster: one placement group, with an actor for the head, for each server and for each worker.

`slipstream up run.toml --on ray` supervises from where it is typed. An actor has a bundle of the group and starts
processes on its node: queue and learner on the head's, each server and worker on its own. Actors, processes and group
are gone when the command ends, however it does: Ray ends the actors of a driver that is gone, and they their processes.

Run directory, task and model are on a file system that all nodes see; each node has Slipstream of the same release.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.deploy.clusters import roles
from slipstream.deploy.clusters.following import Stops
from slipstream.deploy.clusters.roles import (
    Node,
    Part,
    Parts,
    Resources,
    check_fits,
    check_token,
    node_of,
    on_nodes,
    programs,
)
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.deploy.run.processes import KILLED_WITHIN_S, POLL_S, Child, Children, Program
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.fingerprint import release
from slipstream.protocol.config.sections.cluster import ClusterSection

# Time-out of a short question to an actor or the cluster.
ASK_S = 30.0

# For an actor to start: its Python imports Slipstream, on a file system that may be slow.
STARTS_WITHIN_S = 180.0

# Seconds without room after which a line says what the group waits for.
WAITS_S = 2.0

LOST = 137

READ_BYTES = 65536

# On the driver's side a node that is lost is noticed by Ray; the actor then starts on another one.
AGAIN_S = 1.0


class Host:
    """Starts and ends processes on the node where Ray has placed it. It is an actor: others call its methods."""

    def __init__(self, grace_s: float) -> None:
        self._children = Children(grace_s)
        self._running: dict[str, Child] = {}
        self._outputs: dict[str, int] = {}

    async def address(self) -> tuple[str, str]:
        """Return the node's address, and the release of Slipstream there."""
        return _ray().util.get_node_ip_address(), release()

    async def sees(self, path: str) -> bool:
        return await asyncio.to_thread(os.path.exists, path)

    async def run(self, key: str, program: Program, log_dir: str, python: str) -> int:
        """Run a program and return its exit code.

        Args:
            key: Names this run of it, for the other methods.
            program: The program.
            log_dir: Folder of its log.
            python: The Python that its command begins with where it was made; here it is this process's.
        """
        words = list(program.command)
        if words[0] == python:
            words[0] = sys.executable
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        program = replace(program, command=words, env={**program.env, "PATH": path})
        stdout = None
        if program.terminal == "stdout":
            self._outputs[key], stdout = os.pipe()
        try:
            child = self._children.start(program, Path(log_dir), stdout)
        finally:
            if stdout is not None:
                os.close(stdout)
        self._running[key] = child
        while (code := child.poll()) is None:  # noqa: ASYNC110, an actor's loop has no SIGCHLD
            await asyncio.sleep(POLL_S)
        return code

    async def read(self, key: str) -> bytes:
        """Return more of what a program wrote for the terminal, b"" at its end."""
        while key not in self._outputs:  # noqa: ASYNC110, `run` was called before and has not begun
            await asyncio.sleep(POLL_S)
        found = await asyncio.to_thread(os.read, self._outputs[key], READ_BYTES)
        if not found:
            os.close(self._outputs.pop(key))
        return found

    async def alive(self, key: str) -> bool:
        """Tell whether the program, or a process that it started, is left."""
        child = self._running.get(key)
        return child is not None and child.signal(0)

    async def interrupt(self, key: str) -> None:
        """Send the program Ctrl-C, and wait for as long as it needs to end."""
        if key in self._running:
            await self._children.interrupt([self._running[key]])

    async def end(self, key: str, grace_s: float) -> None:
        """End the program and all that it started, as `Children.end`."""
        child = self._running.pop(key, None)
        if child is not None:
            await self._children.end([child], grace_s)


def _ray() -> Any:
    """Import Ray, of which only this engine knows. Its release has types of its own, which differ between releases."""
    import ray
    import ray.util

    return ray


def connect(config: RunConfig) -> RayCluster:
    """Connect to the cluster and check that it has room for each part, and for all of them.

    Raises:
        ConfigError: With the value and the remedy; nothing was placed.
    """
    check_token(config)
    address = config.cluster.ray_address
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--on ray: the package ray is not installed: pip install 'slipstream-rl[ray]'")
    for name in config.cluster.ray_env:
        if name not in os.environ:
            raise ConfigError(f"cluster.ray_env = {name}: there is no such variable here; export it, or leave it out")
    _check_answers(address)
    ray = _ray()
    try:
        with Stops() as stops:  # Ray may crash where a signal ends it as it connects
            ray.init(
                address, log_to_driver=False, logging_level="ERROR", namespace="slipstream", configure_logging=False
            )
            stopped = stops.wait(0)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise ConfigError(f"cluster.ray_address = {address}: {_first_line(error)}; {_START}") from None
    try:
        if stopped is not None:
            raise KeyboardInterrupt if stopped == signal.SIGINT else SystemExit(128 + stopped)
        _check_room(config)
    except BaseException:
        ray.shutdown()
        raise
    return RayCluster(config)


_START = "start a cluster with ray start --head, or name yours, as ray://10.0.0.5:10001 or 10.0.0.5:6379"


def _check_answers(address: str) -> None:
    """Raise `ConfigError` if nothing listens there: Ray itself would try for a minute, with many lines."""
    found = re.fullmatch(r"(?:ray://)?\[?([^\]]+?)\]?:(\d+)", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), 5.0).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cluster.ray_address = {address}: nothing answers there ({error}); {_START}") from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def nodes(found: Sequence[dict[str, Any]]) -> list[Node]:
    """Read the living nodes of a cluster from the answer of `ray.nodes()`."""
    read = []
    for node in found:
        if node["Alive"]:
            has = node["Resources"]
            memory_gb = has.get("memory", 0) / 2**30
            read.append(Node(node["NodeManagerAddress"], int(has.get("GPU", 0)), int(has.get("CPU", 0)), memory_gb))
    return read


def _check_room(config: RunConfig) -> None:
    if config.cluster.ray_grows:
        return
    found, needs = _ray().nodes(), Parts.of(config).needs()
    for part, _, _ in needs:
        setting, labels = _labels(config.cluster, part)
        if not [node for node in found if node["Alive"] and labels.items() <= node.get("Labels", {}).items()]:
            raise ConfigError(
                f"cluster.{setting} = {[f'{name}={value}' for name, value in labels.items()]}: no node of the Ray "
                f"cluster has these labels; start nodes with ray start --labels"
            )
    check_room(needs, nodes(found))


def _labels(cluster: ClusterSection, part: Part) -> tuple[str, dict[str, str]]:
    """Return the setting that chooses the nodes of a part, and the labels that they have."""
    setting = "worker_node_selector" if part == "worker" and cluster.worker_node_selector else "node_selector"
    selector: list[str] = getattr(cluster, setting)
    return setting, dict(label.split("=", 1) for label in selector)


def check_room(needs: Sequence[tuple[Part, Resources, int]], found: Sequence[Node]) -> None:
    """Raise `ConfigError` if a part fits no node, or all of them are more than the cluster has."""
    for part, needed, _ in needs:
        check_fits(part, needed, found, "the Ray cluster")
    more = "add nodes, or set cluster.ray_grows = true if it adds them by itself"
    roles.check_room(needs, found, "the Ray cluster", more)


def bundle(needed: Resources) -> dict[str, float]:
    """Return what Ray is asked for."""
    gpus = {"GPU": float(needed.gpus)} if needed.gpus else {}
    memory = {"memory": float(needed.memory_gb * 2**30)} if needed.memory_gb else {}
    return {"CPU": float(needed.cpus), **gpus, **memory}


def named(part: Part, place: int) -> str:
    """Name the actor of the `place`-th of a part: that of the queue, a server or a worker."""
    if part == "head":
        return f"head-{place}" if place else "head"
    return f"{'vllm' if part == 'server' else part}-{place}"


class RayCluster:
    """The engine: a placement group, with a `Host` in each of its bundles."""

    def __init__(self, config: RunConfig) -> None:
        self._servers = config.vllm.launched
        self._group: Any = None
        self._hosts: dict[str, Any] = {}
        self._of_ranks: list[Any] = []
        self._at: dict[str, str] = {}
        self._grace_s = config.deploy.grace_s
        self._passed = {name: os.environ[name] for name in config.cluster.ray_env}

    def children(self, grace_s: float) -> Children:
        self._grace_s = grace_s
        return RayChildren(grace_s, self)

    async def settle(
        self, config: RunConfig, say: Callable[[str], None], episode_tokens: int | None = None
    ) -> RunConfig:
        needs = Parts.of(config).needs()
        places = [(part, needed, place) for part, needed, count in needs for place in range(count)]
        await self._reserve(config, places, say)
        self._hosts = {
            named(part, place): self._host(index, needed) for index, (part, needed, place) in enumerate(places)
        }
        self._of_ranks = [self._hosts[named("head", node)] for node in range(config.cluster.learner_nodes)]
        await self._ask_all(config)
        return on_nodes(config, self._at["head"])

    async def _reserve(
        self, config: RunConfig, places: Sequence[tuple[Part, Resources, int]], say: Callable[[str], None]
    ) -> None:
        """Make the placement group, and wait until it has room."""
        util = _ray().util
        cluster = config.cluster
        labels = [_labels(cluster, part)[1] for part, _, _ in places]
        self._group = util.placement_group(
            [bundle(needed) for _, needed, _ in places],
            strategy="PACK",
            # Ray takes each name once, and another run may have this one's.
            name=f"slipstream-{config.run.name}-{secrets.token_hex(4)}",
            **({"bundle_label_selector": labels} if any(labels) else {}),
        )
        told = False
        while not await asyncio.to_thread(self._group.wait, WAITS_S):
            if not told:
                free = _ray().available_resources()
                say(
                    f"waiting for room on the Ray cluster for {len(places)} actors; free are {free.get('CPU', 0):g} "
                    f"CPU cores and {free.get('GPU', 0):g} GPUs; Ctrl-C takes the request back"
                )
                told = True

    def _host(self, index: int, needed: Resources) -> Any:
        ray = _ray()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        asked = bundle(needed)
        options = {
            "num_cpus": asked["CPU"],
            "num_gpus": asked.get("GPU", 0),
            "memory": asked.get("memory"),
            "scheduling_strategy": strategy,
            # On another node, once this one is lost and the group has its place there.
            "max_restarts": -1,
        }
        return ray.remote(Host).options(**options).remote(self._grace_s)

    async def _ask_all(self, config: RunConfig) -> None:
        """Learn each actor's address. Raises `ConfigError` where it has another release or other files."""
        parent = config.run_dir.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".slipstream-") as seen:
            answers = await asyncio.gather(
                *(self._ask(host, seen.name) for host in self._hosts.values()), return_exceptions=True
            )
        for name, answer in zip(self._hosts, answers, strict=True):
            if isinstance(answer, TimeoutError):
                raise ConfigError(f"--on ray: the actor of {name} has not started after {STARTS_WITHIN_S:g} s")
            if isinstance(answer, _ray().exceptions.RayError):
                raise ConfigError(
                    f"--on ray: the actor of {name} cannot start: {_cause(answer)}; install slipstream-rl {release()} "
                    f"in the Python of Ray's nodes"
                ) from None
            if isinstance(answer, BaseException):
                raise answer
            address, there, sees = answer
            if there != release():
                raise ConfigError(f"--on ray: node {address} has release {there}, and here is {release()}: install one")
            if not sees:
                raise ConfigError(
                    f"run.dir = {config.run.dir}: node {address} does not see that folder; put run directory, task and "
                    f"model on a file system that all nodes have"
                )
            self._at[name] = address

    async def _ask(self, host: Any, path: str) -> tuple[str, str, bool]:
        address, there = await _answer(host.address.remote(), STARTS_WITHIN_S)
        return address, there, await _answer(host.sees.remote(path), ASK_S)

    def queue_url(self, config: RunConfig) -> str:
        return config.queue.address

    def programs(self, config: RunConfig, run_file: Path, resume: bool) -> list[Program]:
        found = programs(config, run_file, resume, self._servers)
        return [replace(program, env={**self._passed, **program.env}) for program in found]

    def host_of(self, program: Program) -> Any:
        """Return the actor that runs a program."""
        return self._hosts.get(program.name, self._of_ranks[node_of(program)])

    async def placed(self, program: Program, host: Any) -> Program:
        """Return the program as it runs where its actor is now; waits for an actor that moves to another node."""
        while True:
            try:
                address, _ = await _answer(host.address.remote(), STARTS_WITHIN_S)
            except _ray().exceptions.ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)
                continue
            return renamed(program, self._at.get(program.name, address), address)

    def close(self) -> None:
        """Take down what was placed, and leave the cluster."""
        ray = _ray()
        for host in self._hosts.values():
            with contextlib.suppress(*_gone(ray)):
                ray.kill(host)
        if self._group is not None:
            with contextlib.suppress(*_gone(ray)):
                ray.util.remove_placement_group(self._group)
        ray.shutdown()


def _gone(ray: Any) -> tuple[type[BaseException], ...]:
    """Return what Ray raises once the cluster is gone, where nothing is left to take down."""
    return ray.exceptions.RayError, ConnectionError, RuntimeError


def renamed(program: Program, before: str, now: str) -> Program:
    """Return the command of a server whose node has another address than before: it joins as another server.

    The old one is still in the run, until the learner has found it down.
    """
    words = list(program.command)
    if before == now or "--name" not in words or program.role != "vllm":
        return program
    place = words.index("--name") + 1
    words[place] = f"{words[place]}-{re.sub('[^0-9A-Za-z]', '-', now)}"
    return replace(program, command=words)


async def _answer(reference: Any, within_s: float | None) -> Any:
    """Wait for an actor's answer, from a driver in the cluster or a client outside."""
    async with asyncio.timeout(within_s):
        return await asyncio.wrap_future(reference.future())


def _cause(error: BaseException) -> str:
    """Return the last line of what an actor says of its end, which names the exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [type(error).__name__])[-1][:300]


class RayChildren(Children):
    """Starts the check here, and everything else by the actors."""

    def __init__(self, grace_s: float, engine: RayCluster) -> None:
        super().__init__(grace_s)
        self._engine = engine
        self._started = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._engine.close()

    def start(self, program: Program, log_dir: Path, stdout: int | None = None) -> Child:
        if program.role == "preflight":
            return super().start(program, log_dir, stdout)
        log_dir.mkdir(exist_ok=True)
        log = log_dir / f"{program.name}.log"
        log.touch()
        self._started += 1
        child = _Elsewhere(program, log, log.stat().st_size, self._engine, f"{program.name}-{self._started}")
        child.follow(os.dup(sys.stdout.fileno() if stdout is None else stdout))
        self.living.append(child)
        return child

    async def interrupt(self, children: Collection[Child]) -> None:
        elsewhere = [child for child in children if isinstance(child, _Elsewhere)]
        await super().interrupt([child for child in children if child not in elsewhere])
        await asyncio.gather(*(child.interrupt() for child in elsewhere))

    async def end(self, children: Collection[Child], grace_s: float | None = None) -> None:
        elsewhere = [child for child in children if isinstance(child, _Elsewhere)]
        await super().end([child for child in children if child not in elsewhere], grace_s)
        wait_s = self.grace_s if grace_s is None else grace_s
        await asyncio.gather(*(child.end(wait_s) for child in elsewhere))
        for child in elsewhere:
            if child in self.living:
                self.living.remove(child)


class _Running:
    """The process as `Child` asks it."""

    pid = 0
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


class _Elsewhere(Child):
    """A process that an actor runs."""

    def __init__(self, program: Program, log: Path, log_start: int, engine: RayCluster, key: str) -> None:
        self._running = _Running()
        super().__init__(program, self._running, log, log_start)
        self._engine, self._host, self._key = engine, engine.host_of(program), key
        self._following: asyncio.Task[None] | None = None

    def follow(self, stdout: int) -> None:
        """Run it, until its end. `stdout`: where to write what it writes for the terminal; is closed at the end."""
        self._following = asyncio.create_task(self._follow(stdout))

    async def _follow(self, stdout: int) -> None:
        try:
            program = await self._engine.placed(self.program, self._host)
            running = self._host.run.remote(self._key, program, str(self.log.parent.absolute()), sys.executable)
            if program.terminal == "stdout":
                while said := await _answer(self._host.read.remote(self._key), None):
                    await asyncio.to_thread(_write, stdout, said)
            self._running.code = await _answer(running, None)
        except (_ray().exceptions.RayError, OSError, TimeoutError) as error:
            self._end_with(LOST, f"the actor of {self.name} is lost: {_cause(error)}")
        except asyncio.CancelledError:
            self._end_with(LOST, f"{self.name} was given up")
            raise
        finally:
            os.close(stdout)
            self.poll()

    def _end_with(self, code: int, text: str) -> None:
        self._running.code = code
        with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def signal(self, number: int) -> bool:
        raise RunFailed(f"{self.name} is on another machine: end it by RayChildren.end")

    async def interrupt(self) -> None:
        """Send it Ctrl-C, and wait for as long as it needs to end."""
        with contextlib.suppress(*_gone(_ray())):
            await _answer(self._host.interrupt.remote(self._key), None)

    async def end(self, grace_s: float) -> None:
        """End it and all that it started, and wait until that is so."""
        following = self._following
        assert following is not None
        within_s = grace_s + KILLED_WITHIN_S + ASK_S
        with contextlib.suppress(*_gone(_ray()), TimeoutError):
            await _answer(self._host.end.remote(self._key, grace_s), within_s)
            await asyncio.wait({following}, timeout=ASK_S)
        following.cancel()
        await asyncio.wait({following})


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
