"""`slipstream up`, with stand-ins for the processes: what it starts, in which order, and what it says."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from slipstream.protocol import access
from slipstream.protocol.config import load
from slipstream.rollout_queue.store.sqlite import SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME
from tests.deploy.conftest import run_directory, save_checkpoint, save_ledger
from tests.deploy.stage import STAYS, WAITS_FOR_CHILDREN, Stage, until

TOKEN = "hunter2"
NAMES = {"queue": "queue", "vllm": "vllm-0", "worker": "worker-0", "learner": "learner"}


def test_the_run_ends_with_its_learner_and_leaves_no_process(stage: Stage) -> None:
    """Its own output goes to the terminal, all else to the logs."""
    stage.play(learner=WAITS_FOR_CHILDREN.format(3) + "; echo step 60; echo noise >&2")
    result = stage.run()
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"slipstream: run directory {stage.run_dir}, page at http://127.0.0.1:")
    assert lines[1] == f"slipstream: starting queue, vllm-0, worker-0, learner; logs in {stage.logs}"
    assert lines[2:] == ["step 60", "slipstream: learner is done", "slipstream: stopping the others"]
    assert result.stderr == ""
    assert len(stage.children()) == 3
    until(lambda: not stage.alive())
    assert sorted(log.name for log in stage.logs.iterdir()) == [f"{NAMES[role]}.log" for role in sorted(NAMES)]
    assert (stage.logs / "learner.log").read_text() == "noise\n"


def test_i7_what_is_waited_for_is_told(stage: Stage) -> None:
    for role in ("queue", "vllm"):
        stage.play(**{role: "sleep 0.5; " + stage.answers(role)})
    process = stage.start()
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(4)][2:]
    for name in ("queue", "vllm-0"):
        assert any(re.fullmatch(rf"slipstream: {name} answers after \d+\.\d s\n", line) for line in told), told
    process.terminate()


def test_where_a_log_holds_no_error_its_last_lines_are_told(stage: Stage) -> None:
    stage.play(queue="seq 30; exit 3")
    result = stage.run()
    *_, before_last, last = result.stderr.splitlines()
    assert f"the last lines of {stage.logs}/queue.log:\n11\n12\n" in result.stderr
    assert (before_last, last) == ("29", "30")


def test_a_log_without_end_is_kept_short_and_told_once(stage: Stage) -> None:
    stage.play(worker=f"sleep 0.5; seq 100000; {STAYS}")
    log = stage.logs / "worker-0.log"
    stage.play(learner=f"until grep -q 'bytes of this log were dropped' '{log}'; do sleep 0.05; done; sleep 0.3")
    result = stage.run()
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("worker-0.log grew beyond ") == 1
    assert log.stat().st_size <= 100_000


def test_resume_is_advised_where_the_learner_left_a_checkpoint(stage: Stage, run_file: Path) -> None:
    stage.play(learner="exit 3")
    save_checkpoint(run_file)
    told = stage.run("--resume").stderr
    command = f"slipstream up {shlex.quote(str(run_file))} "
    assert f"learner ended with code 3; continue from its newest checkpoint with {command}" in told
    assert told.count(" --resume") == 1


def test_what_a_start_without_a_step_left_is_moved_aside_and_told(stage: Stage) -> None:
    stage.logs.mkdir(parents=True)
    SqliteStore(stage.run_dir / FILE_NAME).close()
    stage.play(learner="exit 0")
    result = stage.run()
    assert result.returncode == 0, result.stderr
    aside = stage.run_dir / "failed-start-1"
    assert f"slipstream: an earlier start made no step; its files are in {aside}\n" in result.stdout
    assert (aside / FILE_NAME).exists()
    assert not (stage.run_dir / FILE_NAME).exists()


def test_a_process_that_is_killed_is_told_with_its_signal(stage: Stage) -> None:
    stage.play(queue="kill -KILL $$")
    result = stage.run()
    assert result.returncode == 128 + signal.SIGKILL
    assert result.stderr.endswith("slipstream: queue ended with code 137 (SIGKILL)\n"), "it logged nothing to quote"
    until(lambda: not stage.alive())


@pytest.mark.parametrize("role", ["queue", "vllm"])
def test_a_service_that_ends_before_the_learner_is_a_failure_whatever_its_code(stage: Stage, role: str) -> None:
    stage.play(**{role: "exit 0"})
    assert stage.run().returncode == 1
    until(lambda: not stage.alive())


def test_a_worker_may_end_before_the_learner(stage: Stage) -> None:
    stage.play(worker="exit 0", learner=f"until grep -q worker calls; do sleep 0.1; done; sleep 0.5; {'exit 0'}")
    result = stage.run("--deploy.restart", "3")
    assert result.returncode == 0, result.stderr
    assert "slipstream: worker-0 is done" in result.stdout
    assert len(stage.calls("worker")) == 1


def test_where_the_check_refuses_nothing_is_started(stage: Stage) -> None:
    stage.play(preflight="echo no >&2; printf 'queue.port = 1: no'; exit 2")
    result = stage.run()
    assert (result.returncode, result.stderr, result.stdout) == (2, "no\nslipstream: queue.port = 1: no\n", "")
    assert not stage.calls()
    assert not stage.run_dir.exists()


def test_epochs_are_told_and_handed_on_as_steps(stage: Stage) -> None:
    stage.play(preflight="""echo '{"rows": 640}'""", learner=WAITS_FOR_CHILDREN.format(3))
    result = stage.run("--learner.epochs", "2.0", "--learner.groups_per_step", "32")
    assert result.returncode == 0, result.stderr
    assert "learner.epochs = 2: 640 rows in steps of 32 groups are 40 steps" in result.stdout
    resolved = load(stage.run_dir / "run.toml").learner
    assert (resolved.steps, resolved.epochs) == (40, None)


def test_where_the_check_crashes_nothing_is_started(stage: Stage) -> None:
    stage.play(preflight="echo Traceback >&2; exit 1")
    result = stage.run()
    assert result.returncode == 1
    assert result.stderr == "Traceback\nslipstream: the check before the start ended with code 1\n"
    assert not stage.calls()
    assert not stage.run_dir.exists()


def test_servers_and_workers_are_numbered(stage: Stage) -> None:
    stage.play(learner=WAITS_FOR_CHILDREN.format(5))
    assert stage.run("--vllm.count", "2", "--worker.count", "2", "--queue.port", "8999").returncode == 0
    run_file = stage.run_dir / "run.toml"
    assert sorted(call.line for call in stage.calls()) == [
        f"learner {run_file}",
        f"queue {run_file}",
        f"vllm {run_file} --index 0",
        f"vllm {run_file} --index 1",
        f"worker {run_file} --name worker-0",
        f"worker {run_file} --name worker-1",
    ]


def test_overrides_resume_and_token_reach_the_processes(stage: Stage, run_file: Path) -> None:
    """With the real check. The token goes by the environment only: no command line and no file holds it. Who runs the
    user's code has its role's (I8)."""
    text = run_file.read_text().replace("[queue]", f'[queue]\ntoken = "{TOKEN}"')
    run_file.write_text(text, encoding="utf-8")
    save_checkpoint(run_file)
    save_ledger(run_file)
    check = f'cd / && exec {sys.executable} -P -m slipstream.deploy.cli "$@"'
    stage.play(preflight=check, learner=WAITS_FOR_CHILDREN.format(3))
    result = stage.run("--resume", "--learner.steps", "7", SLIPSTREAM_TOKEN="")
    assert result.returncode == 0, result.stderr
    assert "a task file may print" in result.stderr
    calls, directory = {call.role: call for call in stage.calls()}, run_directory(run_file)
    assert calls["learner"].line == f"learner {directory}/run.toml --resume"
    assert calls["queue"].line == f"queue {directory}/run.toml"
    lines = (stage.folder / "calls").read_text().splitlines()
    assert len(lines) == 5
    for line in lines:
        role = line.split("|")[4].split()[0]
        derived = access.derive_token(TOKEN, "worker" if role == "worker" else "learner")
        assert line.split("|")[1] == (TOKEN if role in ("queue", "vllm") else derived)
        assert TOKEN not in line.split("|")[4]
    assert "steps = 7 " in (directory / "run.toml").read_text()
    for file in directory.rglob("*"):
        assert file.is_dir() or TOKEN.encode() not in file.read_bytes(), file
