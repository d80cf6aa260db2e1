"""What every engine does with a process: starts it, tells its state and its log, gives it its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.deploy.clusters import ray
from slipstream.deploy.clusters.slurm_job import SlurmJob
from slipstream.deploy.run.engine import ThisMachine
from slipstream.deploy.run.processes import Child, Children, Program
from slipstream.protocol import access
from slipstream.protocol.config import load
from tests.deploy.stage import until
from tests.kit.ray import RayNodes
from tests.kit.slurm import SlurmCluster

GRACE_S = 2.0
Starts = Callable[[], contextlib.AbstractContextManager[Children]]

TALKS = "print('first words', flush=True); print('ValueError: a fault of mine', flush=True); raise SystemExit(3)"

DRAINS = """
import signal, sys, time
def stop(number, frame):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(300)
"""

# Its child's command line holds the name of the test's folder.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", sys.argv[1]])
print("up", flush=True)
time.sleep(300)
"""


SMALL = ["--cluster.worker_cpus", "1", "--cluster.server_cpus", "1", "--cluster.head_cpus", "1"]


@pytest.fixture(
    params=[
        "local",
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("ray", marks=pytest.mark.ray),
        pytest.param("ray://", marks=pytest.mark.ray),
    ]
)
def engine(request: pytest.FixtureRequest, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """Opens the `Children` of an engine that has settled, with room for one worker."""
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "0123456789abcdef0123456789abcdef")
    config = load(run_file, SMALL)
    config.run_dir.mkdir(parents=True)
    if request.param == "local":
        yield lambda: ThisMachine().children(GRACE_S)
    elif request.param in ("ray", "ray://"):
        nodes: RayNodes = request.getfixturevalue("ray_here")
        if request.param == "ray://":
            config = load(run_file, [*SMALL, "--cluster.ray_address", nodes.client_address])
        cluster = ray.connect(config)
        children = cluster.children(GRACE_S)
        asyncio.run(cluster.settle(config, print))
        yield lambda: children
    else:
        slurm: SlurmCluster = request.getfixturevalue("slurm_here")
        environment = slurm.allocation(config, run_file)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        job = SlurmJob(environment)
        asyncio.run(job.settle(config, print))
        yield lambda: job.children(GRACE_S)


TELLS = """
import os, time
from slipstream.protocol import access
print("up", access.given_token(), os.environ["OWN"], flush=True)
time.sleep(300)
"""


def words_of_all_processes() -> list[str]:
    return [word for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or []]


def program(source: str, *arguments: str, **env: str) -> Program:
    return Program("worker-0", "worker", [sys.executable, "-c", source, *arguments], env)


def run(engine: Starts, logs: Path, of: Program, act: Callable[[Child, Children], Awaitable[None]]) -> Child:
    async def work(children: Children) -> Child:
        child = children.start(of, logs)
        reaping = asyncio.create_task(_reap(children))
        try:
            async with asyncio.timeout(60):
                await act(child, children)
        finally:
            reaping.cancel()
            await children.end(list(children.living))
        return child

    with engine() as children:
        return asyncio.run(work(children))


async def _reap(children: Children) -> None:
    while True:
        children.reap()
        await asyncio.sleep(0.05)


async def said(child: Child, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in "\n".join(child.tail()):  # noqa: ASYNC110, a file tells nobody
            await asyncio.sleep(0.05)


async def wait(child: Child, children: Children) -> None:
    await child.wait()


async def end_when_up(child: Child, children: Children) -> None:
    await said(child, "up")
    assert child.poll() is None
    await children.end([child])


def test_an_end_has_its_code_and_the_log_its_words(engine: Starts, tmp_path: Path) -> None:
    child = run(engine, tmp_path / "logs", program(TALKS), wait)
    assert child.poll() == 3
    assert "first words" in child.tail()
    assert child.first_error() == "ValueError: a fault of mine"


def test_a_process_is_told_to_end_and_drains(engine: Starts, tmp_path: Path) -> None:
    child = run(engine, tmp_path / "logs", program(DRAINS), end_when_up)
    assert "drained" in child.tail()
    assert child.poll() is not None


def test_what_does_not_end_is_killed_with_its_children(engine: Starts, tmp_path: Path) -> None:
    child = run(engine, tmp_path / "logs", program(STUBBORN, str(tmp_path)), end_when_up)
    assert child.poll() not in (None, 0)
    until(
        lambda: not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or [])]
    )


def test_variables_arrive_and_no_command_line_or_readable_file_holds_a_token(engine: Starts, tmp_path: Path) -> None:
    token = access.derive_token("0123456789abcdef0123456789abcdef", "worker")
    seen: list[str] = []

    async def look(child: Child, children: Children) -> None:
        await said(child, f"up {token} a value")
        seen.extend(words_of_all_processes())

    run(engine, tmp_path / "logs", program(TELLS, SLIPSTREAM_TOKEN=token, OWN="a value"), look)
    assert len(seen) > 10
    assert [word for word in seen if token in word] == []


@pytest.mark.slurm
def test_slurm_keeps_no_token_on_its_disk(slurm_here: SlurmCluster, run_file: Path, hold: Path) -> None:
    """Scripts and environments of jobs lie in the folders of slurmctld and slurmd."""
    config = load(run_file)
    slurm_here.allocation(config, run_file)
    found = subprocess.run(["grep", "-rl", os.environ["SLIPSTREAM_TOKEN"], str(slurm_here.folder)], capture_output=True)
    assert found.stdout == b""
    assert [oct(file.stat().st_mode & 0o777) for file in sorted((config.run_dir / "tokens").iterdir())] == ["0o600"] * 2
