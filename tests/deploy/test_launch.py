"""deploy/launch.sh, with a stand-in for the `slipstream` command that acts as each test wants it to.

The stand-in notes how it was called and which processes it makes, then runs the script `<role>` of the stage.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deploy.conftest import run_directory

LAUNCH = Path(__file__).parents[2] / "deploy" / "launch.sh"
TOKEN = "hunter2"
LIMIT_S = 20.0

STAND_IN = """#!/usr/bin/env bash
cd "$STAGE"
cores=$(grep Cpus_allowed_list /proc/self/status | cut -f2)
echo "$$|${SLIPSTREAM_TOKEN:-}|${OMP_NUM_THREADS:-}|$cores|$*" >>calls
source "./$1"
"""

# Each has a child of its own: to stop that one too is the launcher's business.
STAYS = "sleep 300 & echo $! >>children; wait"
STUBBORN = f"trap '' TERM; {STAYS}; sleep 300"
FAILS = "sleep 300 & echo $! >>children; echo last words of $1; echo and an error >&2; exit 3"
WAITS_FOR_CHILDREN = "until [ $(wc -l <children) = {} ]; do sleep 0.05; done"


class Call(NamedTuple):
    pid: int
    token: str
    threads: str
    cores: str
    line: str


@dataclass
class Stage:
    """The folder that the stand-in reads and writes, and the launcher that runs on it."""

    folder: Path
    launcher: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        stand_in = self.folder / "slipstream"
        stand_in.write_text(STAND_IN, encoding="utf-8")
        stand_in.chmod(0o755)
        self.run_dir = self.folder / "the run"
        self.play(queue=STAYS, vllm=STAYS, worker=STAYS, learner=STAYS, preflight="echo " + self.variables())

    def variables(self, **changed: str) -> str:
        """The preflight's answer, quoted for a shell."""
        values = {"RUN_DIR": self.run_dir, "RUN_FILE": self.run_dir / "run.toml", "QUEUE_URL": "http://127.0.0.1:1"}
        numbers = {"SERVERS": "1", "WORKERS": "1", "TOKEN": "", "PIN_SERVER": "", "PIN_OTHERS": ""}
        threads = {"SERVER_THREADS": "", "OTHER_THREADS": ""}
        return " ".join(f"\"{name}='{value}'\"" for name, value in {**values, **numbers, **threads, **changed}.items())

    def play(self, **acts: str) -> None:
        for role, act in acts.items():
            (self.folder / role).write_text(act + "\n", encoding="utf-8")

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """The launcher in a process group of its own, as a terminal's foreground."""
        path = f"{self.folder}:{os.environ['PATH']}"
        settings = {**os.environ, "PATH": path, "STAGE": str(self.folder), "SLIPSTREAM_GRACE_S": "1", **env}
        self.launcher = subprocess.Popen(
            ["bash", str(LAUNCH), *(arguments or ["run.toml"])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=settings,
            # A terminal's foreground does not ignore Ctrl-C; what CI starts in the background may.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            start_new_session=True,
        )
        return self.launcher

    def launch(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        launcher = self.start(*arguments, **env)
        out, err = launcher.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess([], launcher.returncode, out, err)

    def calls(self) -> dict[str, Call]:
        """By role, without the preflight's."""
        file = self.folder / "calls"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        calls = [Call(int(pid), *rest) for pid, *rest in (line.split("|", 4) for line in lines)]
        return {call.line.split()[0]: call for call in calls if not call.line.startswith("preflight")}

    def children(self) -> list[int]:
        file = self.folder / "children"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def alive(self) -> list[int]:
        """Of all that was started, what still runs."""
        return [pid for pid in [*(call.pid for call in self.calls().values()), *self.children()] if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.02)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    folder = tmp_path / "a stage"
    folder.mkdir()
    stage = Stage(folder)
    yield stage
    for pid in stage.alive():
        os.kill(pid, signal.SIGKILL)
    if stage.launcher and stage.launcher.poll() is None:
        stage.launcher.kill()


def test_the_run_ends_with_its_learner_and_leaves_no_process(stage: Stage) -> None:
    """Its own output goes to the terminal, all else to the logs."""
    stage.play(learner=WAITS_FOR_CHILDREN.format(3) + "; echo step 60; echo noise >&2")
    result = stage.launch()
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "step 60"
    assert f"run directory {stage.run_dir}, status at http://127.0.0.1:1/v1/status" in result.stdout
    assert result.stderr == ""
    assert len(stage.children()) == 3
    until(lambda: not stage.alive())
    logs = stage.run_dir / "logs"
    assert sorted(log.name for log in logs.iterdir()) == ["learner.log", "queue.log", "vllm-0.log", "worker-0.log"]
    assert (logs / "learner.log").read_text() == "noise\n"


@pytest.mark.parametrize("role", ["queue", "vllm", "worker", "learner"])
def test_a_process_that_dies_ends_the_run_with_its_last_lines(stage: Stage, role: str) -> None:
    stage.play(**{role: FAILS})
    result = stage.launch()
    assert result.returncode == 3
    name = role if role in ("queue", "learner") else f"{role}-0"
    assert f"launch: {name} ended with code 3; the last lines of {stage.run_dir}/logs/{name}.log:" in result.stderr
    assert "and an error" in result.stderr
    assert f"last words of {role}" in (result.stdout if role == "learner" else result.stderr)
    assert stage.children()
    until(lambda: not stage.alive())


def test_a_process_that_is_killed_is_told_with_its_signal(stage: Stage) -> None:
    stage.play(queue="kill -KILL $$")
    result = stage.launch()
    assert result.returncode == 128 + signal.SIGKILL
    assert "launch: queue ended with code 137" in result.stderr
    until(lambda: not stage.alive())


@pytest.mark.parametrize("role", ["queue", "vllm"])
def test_a_service_that_ends_before_the_learner_is_a_failure_whatever_its_code(stage: Stage, role: str) -> None:
    stage.play(**{role: "exit 0"})
    assert stage.launch().returncode == 1
    until(lambda: not stage.alive())


def test_a_worker_may_end_before_the_learner(stage: Stage) -> None:
    stage.play(worker="exit 0", learner="sleep 0.6")
    result = stage.launch()
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["int", "term", "hup"]
)
def test_a_signal_stops_everything(stage: Stage, number: signal.Signals, code: int) -> None:
    """As Ctrl-C in a terminal sends it: to the foreground group. Children of the children end too."""
    launcher = stage.start(SLIPSTREAM_GRACE_S="15")
    until(lambda: len(stage.children()) == 4)
    started = time.monotonic()
    os.killpg(launcher.pid, number)
    assert launcher.wait(LIMIT_S) == code
    assert time.monotonic() - started < 10, "it sat out the grace, though all had ended"
    until(lambda: not stage.alive())


def test_what_ignores_sigterm_is_killed_after_the_grace(stage: Stage) -> None:
    stage.play(vllm=STUBBORN, worker=STUBBORN)
    launcher = stage.start()
    until(lambda: len(stage.children()) == 4)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) == 130
    until(lambda: not stage.alive())


def test_an_impatient_second_ctrl_c_leaves_nothing_behind(stage: Stage) -> None:
    stage.play(vllm=STUBBORN)
    launcher = stage.start()
    until(lambda: len(stage.children()) == 4)
    for _ in range(3):
        os.killpg(launcher.pid, signal.SIGINT)
        time.sleep(0.1)
    assert launcher.wait(LIMIT_S) == 130
    until(lambda: not stage.alive())


def test_a_signal_at_once_after_the_start_leaves_nothing_behind(stage: Stage) -> None:
    launcher = stage.start()
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 143
    until(lambda: not stage.alive())


def test_where_the_preflight_refuses_nothing_is_started(stage: Stage) -> None:
    stage.play(preflight="echo 'slipstream: no' >&2; exit 2")
    result = stage.launch()
    assert (result.returncode, result.stderr, result.stdout) == (2, "slipstream: no\n", "")
    assert not stage.calls()
    assert not stage.run_dir.exists()


def test_servers_and_workers_are_numbered_and_pinned(stage: Stage) -> None:
    pins = {"PIN_SERVER": "taskset -c 0", "PIN_OTHERS": "taskset -c 1", "SERVER_THREADS": "5", "OTHER_THREADS": "6"}
    stage.play(preflight="echo " + stage.variables(SERVERS="2", WORKERS="2", **pins))
    stage.play(learner=WAITS_FOR_CHILDREN.format(5))
    assert stage.launch().returncode == 0
    lines = [line.split("|", 1)[1] for line in (stage.folder / "calls").read_text().splitlines()]
    run_file = stage.run_dir / "run.toml"
    assert sorted(line for line in lines if "preflight" not in line) == sorted(
        [
            f"|6|1|queue {run_file}",
            f"|5|0|vllm {run_file} --index 0",
            f"|5|0|vllm {run_file} --index 1",
            f"|6|1|worker {run_file} --name worker-0",
            f"|6|1|worker {run_file} --name worker-1",
            f"|6|1|learner {run_file}",
        ]
    )


def test_overrides_resume_and_token_reach_the_processes(stage: Stage, run_file: Path) -> None:
    """With the real preflight. The token goes by the environment only: no command line and no file holds it."""
    text = run_file.read_text().replace("[queue]", f'[queue]\ntoken = "{TOKEN}"')
    run_file.write_text(text, encoding="utf-8")
    real = Path(sys.executable).parent / "slipstream"
    stage.play(preflight=f'exec {real} "$@"', learner=WAITS_FOR_CHILDREN.format(3))
    result = stage.launch(str(run_file), "--resume", "--learner.steps", "7", SLIPSTREAM_TOKEN="")
    assert result.returncode == 0, result.stderr
    calls, directory = stage.calls(), run_directory(run_file)
    assert calls["learner"].line == f"learner {directory}/run.toml --resume"
    assert calls["queue"].line == f"queue {directory}/run.toml"
    assert {call.token for call in calls.values()} == {TOKEN}
    assert not any(TOKEN in call.line for call in calls.values())
    assert "steps = 7 " in (directory / "run.toml").read_text()
    for file in directory.rglob("*"):
        assert file.is_dir() or TOKEN not in file.read_text(), file
