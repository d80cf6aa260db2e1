"""deploy/launch.sh: it finds the environment, and everything starts; only vLLM and the learner are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.deploy.conftest import run_directory

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "deploy" / "launch.sh"
BIN = Path(sys.executable).parent
LIMIT_S = 100.0

FAKE_VLLM = """
import runpy, sys
sys.argv = ["fake_vllm", "--port", sys.argv[sys.argv.index("--port") + 1]]
runpy.run_module("tests.kit.fake_vllm", run_name="__main__")
"""

# It is done once everyone has come: the queue answers, with the server announced and a worker's first report.
LEARNER = """
import asyncio, os, time
from urllib.request import urlopen
from protocol.client import QueueClient

def run(config, queue_url, resume):
    async def everyone():
        async with QueueClient(config.queue.url, config.token) as queue:
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
    print(f"step 7: {server.name} {health}, {worker.worker_id}, resume {resume}, {config.learner.steps} steps")
"""


def test_everything_starts_with_one_command(run_file: Path, tmp_path: Path) -> None:
    """Real queue, real worker, real checks, from a working directory of its own."""
    stubs = tmp_path / "stubs"
    for path, source in {
        "vllm/__init__.py": "",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/openai/__init__.py": "",
        "vllm/entrypoints/openai/api_server.py": FAKE_VLLM,
        "learner/__init__.py": "",
        "learner/trainer.py": "class DivergedError(Exception): ...",
        "learner/loop.py": LEARNER,
    }.items():
        file = stubs / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": f"{stubs}:{ROOT}"}
    command = ["bash", str(LAUNCH), run_file.name, "--resume", "--learner.steps", "7"]
    done = subprocess.run(command, cwd=run_file.parent, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    logs = run_directory(run_file) / "logs"
    told = done.stdout + done.stderr + "".join(log.read_text() for log in logs.glob("*"))
    assert done.returncode == 0, told
    assert "step 7: vllm-0 200, worker-0, resume True, 7 steps" in done.stdout
    assert "slipstream: queue answers after" in done.stdout
    assert "slipstream: learner is done" in done.stdout
    assert {log.name for log in logs.iterdir()} == {"queue.log", "vllm-0.log", "worker-0.log", "learner.log"}
    assert "Traceback" not in told
    assert "worker worker-0: 0 episodes done" in (logs / "worker-0.log").read_text()


def shadow_checkout(tmp_path: Path) -> Path:
    """launch.sh in a checkout of its own; the path of its environment's command."""
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
