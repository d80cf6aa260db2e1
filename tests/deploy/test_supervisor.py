"""`slipstream up`, with stand-ins for the processes: what it starts, starts again, stops, and says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import access
from protocol.config import load
from rollout_queue.store.sqlite import FILE_NAME, SqliteStore
from tests.deploy.conftest import run_directory, save_checkpoint
from tests.deploy.stage import ANSWERING, FAILS, LIMIT_S, STAYS, STUBBORN, WAITS_FOR_CHILDREN, Stage, until

TOKEN = "hunter2"
# A queue whose run is not finished.
UNFINISHED = ANSWERING.replace("Content-Length: 0\\r\\n\\r\\n", 'Content-Length: 19\\r\\n\\r\\n{\\"finished\\": false}')
NAMES = {"queue": "queue", "vllm": "vllm-0", "worker": "worker-0", "learner": "learner"}


@pytest.fixture
def stage(tmp_path: Path, run_file: Path) -> Iterator[Stage]:
    folder = tmp_path / "a stage"
    folder.mkdir()
    stage = Stage(folder, run_file)
    yield stage
    if stage.process and stage.process.poll() is None:
        stage.process.kill()
    for pid in stage.alive():
        with contextlib.suppress(ProcessLookupError):  # it may end between the look and the kill
            os.kill(pid, signal.SIGKILL)


def test_the_run_ends_with_its_learner_and_leaves_no_process(stage: Stage) -> None:
    """Its own output goes to the terminal, all else to the logs."""
    stage.play(learner=WAITS_FOR_CHILDREN.format(3) + "; echo step 60; echo noise >&2")
    result = stage.run()
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"slipstream: run directory {stage.run_dir}, status at http://127.0.0.1:")
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


@pytest.mark.parametrize("role", NAMES)
def test_without_restarts_a_process_that_dies_ends_the_run_with_its_first_error(stage: Stage, role: str) -> None:
    stage.play(**{role: FAILS})
    result = stage.run("--deploy.restart", "0")
    assert result.returncode == 3
    again = "; fix it and start again: it made no step, so the run's name is free"
    why = {"vllm": " before it ever answered", "learner": again}.get(role, "")
    log = f"{stage.logs}/{NAMES[role]}.log"
    assert result.stderr.endswith(
        f"slipstream: {NAMES[role]} ended with code 3{why}; the first error in {log}:\nand an Error: of {role}\n"
    )
    assert (f"last words of {role}" in result.stdout) == (role == "learner")
    assert stage.children()
    until(lambda: not stage.alive())
    assert len(stage.calls(role)) == 1


def test_where_a_log_holds_no_error_its_last_lines_are_told(stage: Stage) -> None:
    stage.play(queue="seq 30; exit 3")
    result = stage.run()
    *_, before_last, last = result.stderr.splitlines()
    assert f"the last lines of {stage.logs}/queue.log:\n11\n12\n" in result.stderr
    assert (before_last, last) == ("29", "30")


def test_resume_is_advised_where_the_learner_left_a_checkpoint(stage: Stage, run_file: Path) -> None:
    stage.play(learner="exit 3")
    save_checkpoint(run_file)
    assert "learner ended with code 3; go on from its newest checkpoint with --resume" in stage.run("--resume").stderr


def test_what_a_start_without_a_step_left_is_moved_aside_and_told(stage: Stage) -> None:
    stage.logs.mkdir(parents=True)
    SqliteStore(stage.run_dir / FILE_NAME).close()
    stage.play(learner="exit 0")
    result = stage.run()
    assert result.returncode == 0, result.stderr
    aside = stage.run_dir / "failed-start-1"
    assert f"slipstream: an earlier start made no step; what it left is in {aside}\n" in result.stdout
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


@pytest.mark.parametrize("role", ["queue", "vllm", "worker"])
def test_what_is_killed_is_started_again_and_the_run_goes_on(stage: Stage, role: str) -> None:
    """With nothing left of what it had started before."""
    if role in stage.ports:
        stage.play(**{role: f"echo life $lives; {stage.answers(role)}"})
    else:
        stage.play(**{role: f"echo life $lives; {STAYS}"})
    stage.play(learner="until [ -e finish ]; do sleep 0.1; done")
    process = stage.start("--deploy.restart", "1")
    assert process.stdout is not None
    assert process.stderr is not None
    if role in stage.ports:
        until(lambda: f"{NAMES[role]} answers" in process.stdout.readline())  # type: ignore[union-attr]
    until(lambda: len(stage.children()) == 3)
    before = stage.alive()
    (first,) = stage.calls(role)
    os.kill(first.pid, signal.SIGKILL)
    told = process.stderr.readline()
    name = NAMES[role]
    assert (
        told
        == f"slipstream: {name} ended with code 137 (SIGKILL); starting it again in 1 s (restart 1 of 1 in a row)\n"
    )
    until(lambda: len(stage.calls(role)) == 2 and len(stage.children()) == 4)
    assert len(set(before) & set(stage.alive())) == len(before) - 2, "its child went on, or more than it was stopped"
    (stage.folder / "finish").touch()
    assert process.wait(LIMIT_S) == 0
    assert (stage.logs / f"{name}.log").read_text() == "life 1\nlife 2\n"
    until(lambda: not stage.alive())


def test_what_a_killed_server_left_behind_is_ended_at_once_and_not_after_the_grace(stage: Stage) -> None:
    """vLLM's engine takes its time on SIGTERM when its API process is gone: nobody needs what it does."""
    orphan = "(trap '' TERM; while :; do sleep 1; done) & echo $! >>children"
    stage.play(vllm=f"{orphan}; {stage.answers('vllm')}", learner="until [ -e finish ]; do sleep 0.1; done")
    process = stage.start("--deploy.restart", "1", "--deploy.grace_s", "40")
    assert process.stdout is not None
    until(lambda: "vllm-0 answers" in process.stdout.readline())  # type: ignore[union-attr]
    (first,) = stage.calls("vllm")
    started = time.monotonic()
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: len(stage.calls("vllm")) == 2)
    assert time.monotonic() - started < 20
    os.killpg(stage.calls("vllm")[-1].pid, signal.SIGKILL)  # it would sit out the grace at the end
    (stage.folder / "finish").touch()
    process.wait(LIMIT_S)
    until(lambda: not stage.alive())


def test_restarts_are_bounded_and_each_is_told_with_its_cause(stage: Stage) -> None:
    stage.play(worker=FAILS)
    result = stage.run("--deploy.restart", "1")
    assert result.returncode == 3
    again, *_ = result.stderr.splitlines()
    assert again == (
        "slipstream: worker-0 ended with code 3: and an Error: of worker; starting it again in 1 s "
        "(restart 1 of 1 in a row)"
    )
    assert "worker-0 ended with code 3 once more than deploy.restart = 1 allows; the first error in" in result.stderr
    assert len(stage.calls("worker")) == 2
    until(lambda: not stage.alive())


@pytest.mark.parametrize(
    ("role", "act", "code"),
    [("learner", FAILS, 3), ("vllm", FAILS, 3), ("worker", "exit 2", 2), ("queue", "exit 2", 2)],
    ids=["the learner", "a server that never answered", "a worker's wrong setting", "the queue's wrong setting"],
)
def test_what_would_end_alike_is_not_started_again(stage: Stage, role: str, act: str, code: int) -> None:
    stage.play(**{role: act})
    assert stage.run("--deploy.restart", "3").returncode == code
    assert len(stage.calls(role)) == 1
    until(lambda: not stage.alive())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["int", "term", "hup"]
)
def test_a_signal_stops_everything(stage: Stage, number: signal.Signals, code: int) -> None:
    """As Ctrl-C in a terminal sends it: to the foreground group. Children of the children end too."""
    process = stage.start("--deploy.grace_s", "50")
    until(lambda: len(stage.children()) == 4)
    started = time.monotonic()
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert time.monotonic() - started < 40, "it sat out the grace, though all had ended"
    assert err.splitlines() == [err.strip()], "one line, and no traceback"
    until(lambda: not stage.alive())


@pytest.mark.parametrize("cause", ["a signal", "a process that fails"])
def test_the_learner_ends_before_the_others_which_take_its_last_report(stage: Stage, cause: str) -> None:
    """It gets its grace for a checkpoint while the queue still answers."""
    queue_is_up = "kill -0 $(grep '|queue ' calls | cut -d '|' -f 1)"
    stage.play(
        queue=stage.answers("queue"),
        learner=f"finish() {{ sleep 0.5; {queue_is_up} && echo saved; exit 143; }}; trap finish TERM; {STAYS}",
        worker="until [ -e fail ]; do sleep 0.1; done; exit 3",
    )
    process = stage.start("--deploy.grace_s", "30")
    until(lambda: len(stage.children()) == 3 and len(stage.calls()) == 4)
    (stage.folder / "fail").touch() if cause != "a signal" else process.terminate()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == (143 if cause == "a signal" else 3)
    assert "saved\n" in out, err
    until(lambda: not stage.alive())


@pytest.mark.parametrize("act", ["preflight", "worker"])
def test_a_signal_stops_the_check_and_a_pause_too(stage: Stage, act: str) -> None:
    stage.play(preflight=STAYS) if act == "preflight" else stage.play(worker="exit 1")
    process = stage.start("--deploy.restart", "9")
    until(lambda: stage.children() if act == "preflight" else len(stage.calls("worker")) == 3)
    process.terminate()
    assert process.wait(LIMIT_S) == 143
    until(lambda: not stage.alive())


def test_three_ctrl_c_during_the_check_print_one_line(stage: Stage) -> None:
    stage.play(preflight=STUBBORN)
    process = stage.start()
    until(stage.children)
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert err == "slipstream: interrupted, stopping; what has not ended in 1 s is killed\n"
    assert not stage.run_dir.exists()
    until(lambda: not stage.alive())


def test_a_signal_that_is_ignored_stays_ignored(stage: Stage) -> None:
    """As nohup wants it."""
    process = stage.start(ignore=signal.SIGHUP)
    until(lambda: len(stage.children()) == 4)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    assert process.wait(LIMIT_S) == 143


def test_what_ignores_sigterm_is_killed_after_the_grace(stage: Stage) -> None:
    stage.play(vllm=STUBBORN, worker=STUBBORN)
    process = stage.start()
    until(lambda: len(stage.children()) == 4)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    until(lambda: not stage.alive())


def test_an_impatient_second_ctrl_c_leaves_nothing_behind(stage: Stage) -> None:
    stage.play(vllm=STUBBORN)
    process = stage.start()
    until(lambda: len(stage.children()) == 4)
    for _ in range(30):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    until(lambda: not stage.alive())


def test_a_signal_at_once_after_the_start_leaves_nothing_behind(stage: Stage) -> None:
    process = stage.start()
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.wait(LIMIT_S) == 143
    until(lambda: not stage.alive())


def test_a_supervisor_that_is_killed_leaves_nothing_behind(stage: Stage) -> None:
    """Not even what ignores SIGTERM."""
    stage.play(vllm=STUBBORN)
    process = stage.start()
    until(lambda: len(stage.children()) == 4)
    process.kill()
    until(lambda: not stage.alive())


def test_a_supervisor_that_fails_leaves_nothing_behind(stage: Stage) -> None:
    result = stage.run(BROKEN="1")
    assert result.returncode == 1
    assert "RuntimeError: a fault of the supervisor" in result.stderr
    until(lambda: not stage.alive())


def test_a_terminal_that_is_gone_does_not_keep_the_run_from_being_stopped(stage: Stage) -> None:
    process = stage.start()
    until(lambda: len(stage.children()) == 4)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    process.wait(LIMIT_S)
    until(lambda: not stage.alive())


def test_where_the_check_refuses_nothing_is_started(stage: Stage) -> None:
    stage.play(preflight="echo no >&2; printf 'queue.port = 1: no'; exit 2")
    result = stage.run()
    assert (result.returncode, result.stderr, result.stdout) == (2, "no\nslipstream: queue.port = 1: no\n", "")
    assert not stage.calls()
    assert not stage.run_dir.exists()


def test_epochs_are_told_and_handed_on_as_steps(stage: Stage) -> None:
    stage.play(preflight="printf 640", learner=WAITS_FOR_CHILDREN.format(3))
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
    check = f'cd / && exec {sys.executable} -P -m deploy.cli "$@"'
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
        assert file.is_dir() or TOKEN not in file.read_text(), file


def test_a_worker_that_ends_while_the_run_goes_on_is_started_again(stage: Stage) -> None:
    """As one whose tool calls os._exit(0) ends."""
    stage.play(
        queue=f"sleep 300 & {sys.executable} -I -S unfinished.py {stage.ports['queue']}", vllm=stage.answers("vllm")
    )
    (stage.folder / "unfinished.py").write_text(UNFINISHED, encoding="utf-8")
    stage.play(
        worker=f"[ $lives = 1 ] && sleep 2 && exit 0; {STAYS}",
        learner="until [ $(grep -c '|worker ' calls) = 2 ]; do sleep 0.1; done",
    )
    result = stage.run("--deploy.restart", "3")
    assert result.returncode == 0, result.stderr
    assert "worker-0 ended with code 0; starting it again in 1 s" in result.stderr


def test_a_worker_of_a_run_that_is_given_up_is_not_started_again(stage: Stage) -> None:
    """The learner says why, and that once."""
    given_up = ANSWERING.replace(
        "Content-Length: 0\\r\\n\\r\\n", 'Content-Length: 16\\r\\n\\r\\n{\\"gave_up\\": \\"x\\"}'
    )
    (stage.folder / "given_up.py").write_text(given_up, encoding="utf-8")
    stage.play(
        queue=f"sleep 300 & {sys.executable} -I -S given_up.py {stage.ports['queue']}", vllm=stage.answers("vllm")
    )
    stage.play(worker="sleep 2; exit 1", learner="sleep 5; exit 1")
    result = stage.run("--deploy.restart", "3")
    assert result.returncode == 1
    assert "starting it again" not in result.stderr
