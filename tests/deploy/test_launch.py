"""deploy/launch.sh: it finds the environment, and everything starts; only vLLM and the learner are stand-ins."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.protocol import access
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import load
from slipstream.protocol.status import Status
from tests.deploy.conftest import run_directory, save_checkpoint, save_ledger
from tests.deploy.stage import until

ROOT = Path(__file__).parents[2]
# One starts nine interpreters, which a busy machine takes its time for.
pytestmark = pytest.mark.timeout(400)

LAUNCH = ROOT / "deploy" / "launch.sh"
BIN = Path(sys.executable).parent
LIMIT_S = 200.0

FAKE_VLLM = """
import runpy, sys
sys.argv = ["fake_vllm", "--port", sys.argv[sys.argv.index("--port") + 1]]
runpy.run_module("tests.kit.fake_vllm", run_name="__main__")
"""

# It is done once everyone has come: the queue answers, with the server announced and a worker's first report; and once
# nothing holds it back.
LEARNER = """
import asyncio, os, time
from urllib.request import urlopen
from slipstream.protocol.client import QueueClient

def run(config, queue_url, resume, take_over, demonstrations=()):
    async def everyone():
        async with QueueClient(config.queue.address, config.token) as queue:
            while True:
                status = await queue.status()
                if status.workers and status.servers:
                    return [*status.servers, *status.workers]
                await asyncio.sleep(0.1)
    server, worker = asyncio.run(everyone())
    while True:
        try:
            health = urlopen(server.url + "/health").status
            break
        except OSError:
            time.sleep(0.1)
    facts = f"{server.name} {health}, {worker.worker_id}, resume {resume}, {config.learner.steps} steps"
    print(f"step 7: {facts}", flush=True)
    while os.path.exists("hold"):
        time.sleep(0.1)
"""


@pytest.fixture
def launcher(run_file: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Real queue, real worker, real checks, from its own working directory; stderr goes to stdout."""
    stubs = tmp_path / "stubs"
    for path, source in {
        "vllm/__init__.py": "",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/openai/__init__.py": "",
        "vllm/entrypoints/openai/api_server.py": FAKE_VLLM,
        # The rest of the package is the real one: what is checked at the start is in it.
        "slipstream/__init__.py": f"__path__.append({str(ROOT / 'slipstream')!r})",
        "slipstream/learner/__init__.py": f"__path__.append({str(ROOT / 'learner')!r})",
        "slipstream/learner/run.py": LEARNER,
    }.items():
        file = stubs / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    (run_file.parent / "hold").touch()
    save_checkpoint(run_file)
    save_ledger(run_file)
    with subprocess.Popen(
        ["bash", str(LAUNCH), run_file.name, "--resume", "--learner.steps", "7"],
        cwd=run_file.parent,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": f"{stubs}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        yield launcher
        launcher.terminate()


def read_until(launcher: subprocess.Popen[str], *texts: str) -> list[str]:
    """The lines up to the one by which all of `texts` have been said."""
    assert launcher.stdout is not None
    lines: list[str] = []
    while not all(any(text in line for line in lines) for text in texts):
        line = launcher.stdout.readline()
        assert line, lines
        lines.append(line)
    return lines


def release(launcher: subprocess.Popen[str], run_file: Path) -> str:
    """Let the learner end; what was said until the end, and all logs."""
    (run_file.parent / "hold").unlink()
    said, _ = launcher.communicate(timeout=LIMIT_S)
    told = said + "".join(log.read_text() for log in (run_directory(run_file) / "logs").glob("*"))
    assert launcher.returncode == 0, told
    return told


@pytest.fixture
def secret(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the run's secret, and have its task print all that it is told. Comes before `launcher`."""
    made = "0123456789abcdef0123456789abcdef"
    monkeypatch.setenv("SLIPSTREAM_TOKEN", made)
    task = load(run_file).task.file
    telling = "import os, subprocess\nprint('told', dict(os.environ))\nsubprocess.run(['env'])\n"
    task.write_text(telling + task.read_text(), encoding="utf-8")
    return made


def assert_no_token_is_shown(launcher: subprocess.Popen[str], secret: str, derived: dict[str, str]) -> None:
    """By command lines, or to who runs code of the user's."""
    run = psutil.Process(launcher.pid)
    environments: dict[str, str] = {}
    for process in [run, *run.children(recursive=True)]:
        line = process.cmdline()
        assert not [word for word in line for token in (secret, *derived.values()) if token in word], line
        if len(line) > 4 and line[3] == "slipstream.deploy.cli":
            environments[line[4]] = process.environ()["SLIPSTREAM_TOKEN"]
    assert environments["queue"] == secret
    assert environments["worker"] == derived["worker"]
    assert environments["learner"] == derived["learner"]


def test_i8_everything_starts_with_one_command_goes_on_when_parts_are_killed_and_nothing_holds_a_token(
    run_file: Path, secret: str, launcher: subprocess.Popen[str]
) -> None:
    """The user's code is told no token either."""
    step = "step 7: vllm-0 200, worker-0, resume True, 7 steps"
    heard = read_until(launcher, step, "slipstream: queue answers after", "slipstream: vllm-0 answers after")
    derived = {role: access.derive_token(secret, role) for role in access.ROLES}
    assert_no_token_is_shown(launcher, secret, derived)
    for name, word in (("worker-0", "worker"), ("queue", "queue"), ("vllm-0", "vllm.entrypoints.openai.api_server")):
        (pid,) = [child.pid for child in psutil.Process(launcher.pid).children() if word in child.cmdline()]
        os.kill(pid, signal.SIGKILL)
        again = f"slipstream: {name} ended with code 137 (SIGKILL); starting it again in 1 s (restart 1 of 3 in a row)"
        heard += read_until(launcher, again, *([f"{name} answers after"] if name != "worker-0" else []))
    url = load(run_file).queue.address
    until(lambda: "worker-0" in {worker.worker_id for worker in asyncio.run(status(url, secret)).workers})
    assert_no_token_is_shown(launcher, secret, derived)
    told = "".join(heard) + release(launcher, run_file)
    assert "queue of run small" in told
    assert "the queue: ended, and was started again, " in told, "what happened is told at the end"
    assert "slipstream: learner is done" in told
    assert "Traceback" not in told
    logs = run_directory(run_file) / "logs"
    assert {log.name for log in logs.iterdir()} == {"queue.log", "vllm-0.log", "worker-0.log", "learner.log"}
    assert "worker worker-0: 0 episodes done" in (logs / "worker-0.log").read_text()
    assert "'PATH'" in told
    assert "PWD=" in told
    for token in (secret, *derived.values()):
        assert token not in told
        for file in run_directory(run_file).rglob("*"):
            assert file.is_dir() or token.encode() not in file.read_bytes(), file


async def status(url: str, token: str) -> Status:
    async with QueueClient(url, token) as queue:
        return await queue.status()


def shadow_checkout(tmp_path: Path) -> Path:
    """launch.sh in its own checkout; the path of its environment's command."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(LAUNCH, tmp_path / "deploy" / "launch.sh")
    command = tmp_path / ".venv" / "bin" / "slipstream"
    command.parent.mkdir(parents=True)
    return command


def launch_there(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(tmp_path / "deploy" / "launch.sh"), *arguments]
    return subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=LIMIT_S)


def test_the_environment_beside_the_checkout_is_found_where_none_is_activated(tmp_path: Path) -> None:
    command = shadow_checkout(tmp_path)
    command.write_text('#!/bin/sh\nprintf "<%s>" "$@"; exit 5\n')
    command.chmod(0o755)
    done = launch_there(tmp_path, "a run.toml", "--learner.steps", "7")
    assert (done.returncode, done.stdout) == (5, "<up><a run.toml><--learner.steps><7>")


def test_without_an_environment_it_says_how_to_get_one(tmp_path: Path) -> None:
    shadow_checkout(tmp_path)
    done = launch_there(tmp_path, "run.toml")
    assert done.returncode == 2
    assert "there is no slipstream command" in done.stderr
    assert "deploy/quickstart.sh" in done.stderr
