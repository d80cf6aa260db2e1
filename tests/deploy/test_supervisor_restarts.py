"""`slipstream up`, with stand-ins for the processes: which are started again when they end, and which end the
run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.stage import ANSWERING, FAILS, LIMIT_S, STAYS, Stage, until
from tests.kit.postgres import killable_cluster

# A queue whose run is not finished.
UNFINISHED = ANSWERING.replace("Content-Length: 0\\r\\n\\r\\n", 'Content-Length: 19\\r\\n\\r\\n{\\"finished\\": false}')
# The real queue, which waits for its database a second at a time.
REAL_QUEUE = """
from slipstream.rollout_queue.store import postgres
postgres.MAX_LOST_S = 1.0
from slipstream.deploy import cli
cli.main()
"""
NAMES = {"queue": "queue", "vllm": "vllm-0", "worker": "worker-0", "learner": "learner"}


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


@pytest.mark.parametrize(
    ("role", "number"),
    [("queue", signal.SIGKILL), ("vllm", signal.SIGKILL), ("worker", signal.SIGKILL), ("vllm", signal.SIGTERM)],
)
def test_what_is_killed_is_started_again_and_the_run_goes_on(stage: Stage, role: str, number: signal.Signals) -> None:
    """With nothing left of what it had started before, and no cause but the signal, whatever stands in its log."""
    survived = "echo ValueError: which it survived"
    stage.play(**{role: f"echo life $lives; {survived}; {stage.answers(role) if role in stage.ports else STAYS}"})
    stage.play(learner="until [ -e finish ]; do sleep 0.1; done")
    process = stage.start("--deploy.restart", "1")
    assert process.stdout is not None
    assert process.stderr is not None
    if role in stage.ports:
        until(lambda: f"{NAMES[role]} answers" in process.stdout.readline())  # type: ignore[union-attr]
    until(lambda: len(stage.children()) == 3)
    before = stage.alive()
    (first,) = stage.calls(role)
    os.kill(first.pid, number)
    told = process.stderr.readline()
    name, code = NAMES[role], f"{128 + number} ({number.name})"
    assert told == f"slipstream: {name} ended with code {code}; starting it again in 0.1 s (restart 1 of 1 in a row)\n"
    until(lambda: len(stage.calls(role)) == 2 and len(stage.children()) == 4)
    assert len(set(before) & set(stage.alive())) == len(before) - 2, "its child continued, or more than it was stopped"
    (stage.folder / "finish").touch()
    assert process.wait(LIMIT_S) == 0
    lives = [f"life {life}\nValueError: which it survived\n" for life in (1, 2)]
    assert (stage.logs / f"{name}.log").read_text() == "".join(lives)
    until(lambda: not stage.alive())


def test_a_server_that_is_killed_before_it_answers_is_started_again_with_its_last_lines(stage: Stage) -> None:
    stage.play(vllm=f"[ $lives = 1 ] && {{ echo loading weights; kill -KILL $$; }}; {stage.answers('vllm')}")
    stage.play(learner=stage.waits_for("vllm"))
    result = stage.run("--deploy.restart", "1")
    assert result.returncode == 0, result.stderr
    assert "vllm-0 ended with code 137 (SIGKILL) before it ever answered; starting it again" in result.stderr
    assert result.stderr.splitlines()[1] == "loading weights"


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
        "slipstream: worker-0 ended with code 3: and an Error: of worker; starting it again in 0.1 s "
        "(restart 1 of 1 in a row)"
    )
    assert "worker-0 ended with code 3 once more than deploy.restart = 1 allows; the first error in" in result.stderr
    assert len(stage.calls("worker")) == 2
    until(lambda: not stage.alive())


@pytest.mark.parametrize("end", ["exit 75", "kill -KILL $$"], ids=["it has lost a rank", "rank 0 is killed"])
def test_a_learner_of_several_ranks_goes_on_from_its_newest_checkpoint_and_the_rest_notices_nothing(
    stage: Stage, end: str
) -> None:
    stage.play(queue=stage.answers("queue"), vllm=stage.answers("vllm"))
    stage.play(learner=f"[ $lives = 1 ] && {stage.waits_for('queue')} && {stage.waits_for('vllm')} && {end}; exit 0")
    result = stage.run("--deploy.restart", "1", "--learner.ranks", "2")
    assert result.returncode == 0, result.stderr
    assert (
        "starting all ranks of the learner again from the newest checkpoint in 0.1 s (restart 1 of 1" in result.stderr
    )
    first, second = stage.calls("learner")
    assert "--resume" not in first.line
    assert second.line == f"{first.line} --resume"
    assert [len(stage.calls(role)) for role in ("queue", "vllm", "worker")] == [1, 1, 1]


@pytest.mark.parametrize(("ranks", "end"), [("1", "kill -KILL $$"), ("1", "exit 75"), ("2", "exit 1")])
def test_a_learner_that_fails_by_itself_ends_the_run(stage: Stage, ranks: str, end: str) -> None:
    stage.play(learner=end)
    assert stage.run("--deploy.restart", "1", "--learner.ranks", ranks).returncode in (1, 75, 137)
    assert len(stage.calls("learner")) == 1


def test_a_process_whose_log_was_deleted_is_told_to_have_left_no_cause(stage: Stage) -> None:
    stage.play(worker=f"rm -r '{stage.logs}'; {FAILS}")
    result = stage.run()
    assert f"its log {stage.logs}/worker-0.log was deleted or moved while it ran" in result.stderr.splitlines()[-1]


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


def test_a_worker_that_ends_while_the_run_goes_on_is_started_again(stage: Stage) -> None:
    """As one whose tool calls os._exit(0) ends."""
    stage.play(
        queue=f"sleep 300 & {sys.executable} -I -S unfinished.py {stage.ports['queue']}", vllm=stage.answers("vllm")
    )
    (stage.folder / "unfinished.py").write_text(UNFINISHED, encoding="utf-8")
    stage.play(
        worker=f"[ $lives = 1 ] && {stage.waits_for('queue')} && exit 0; {STAYS}",
        learner="until [ $(grep -c '|worker ' calls) = 2 ]; do sleep 0.1; done",
    )
    result = stage.run("--deploy.restart", "3")
    assert result.returncode == 0, result.stderr
    assert "worker-0 ended with code 0; starting it again in 0.1 s" in result.stderr


def test_a_script_that_returns_before_it_joined_is_no_success(stage: Stage) -> None:
    stage.play(queue=f"sleep 300 & {sys.executable} -I -S unfinished.py {stage.ports['queue']}")
    (stage.folder / "unfinished.py").write_text(UNFINISHED, encoding="utf-8")
    (stage.folder / "train.py").write_text("", encoding="utf-8")
    stage.play(learner=f"{stage.waits_for('queue')}; exit 0")
    result = stage.run("--learner.script", str(stage.folder / "train.py"))
    assert result.returncode == 1
    assert "learner ended with code 0 before the run was finished: does learner.script call main()" in result.stderr


# A queue whose run is finished once the file `finished` is there, and stands still before.
TAKEN = ANSWERING.replace("import socket, sys", "import os, socket, sys").replace(
    'b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n"',
    """(lambda body: b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%s" % (len(body), body))(
        b'{"finished": %s, "stall": {"stalled": true, "since_s": 9, "why": "the learner was last heard from 9 s ago"}}'
        % (b"true" if os.path.exists("finished") else b"false"))""",
)


def test_a_learner_from_which_another_one_takes_the_run_ends_alone(stage: Stage) -> None:
    """The queue, servers and workers continue for the other one, until the run is finished."""
    stage.play(queue=f"sleep 300 & {sys.executable} -I -S taken.py {stage.ports['queue']}")
    (stage.folder / "taken.py").write_text(TAKEN, encoding="utf-8")
    stage.play(learner=f"{stage.waits_for('queue')}; until [ -e 'continue' ]; do sleep 0.05; done; exit 76")
    process = stage.start("--deploy.restart", "1")
    until(lambda: len(stage.calls()) == 4)
    (stage.folder / "continue").touch()
    assert process.stderr is not None
    assert "as another one has taken the run over" in process.stderr.readline()
    assert "stalled: no step for 9 s: the learner was last heard from 9 s ago" in process.stderr.readline()
    assert {call.role for call in stage.calls() if call.pid in stage.alive()} == {"queue", "vllm", "worker"}
    (stage.folder / "finished").touch()
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.wait() == 0
    assert "the run is finished" in out
    until(lambda: not stage.alive())


# A queue that has not heard from the learner for long until the file `back` is there; `asked` says that it told so.
QUIET = ANSWERING.replace("import socket, sys", "import os, socket, sys").replace(
    '    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")\n',
    """    back = os.path.exists("back")
    body = b'{"finished": false, "learner": {"seen_s_ago": %d}}' % (0 if back else 999)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%b" % (len(body), body))
    back and open("asked", "w").close()
""",
)


def test_a_learner_that_is_stopped_is_told_by_its_launcher(stage: Stage) -> None:
    """It has the terminal, and cannot say so itself."""
    stage.play(queue=f"sleep 300 & {sys.executable} -I -S quiet.py {stage.ports['queue']}")
    (stage.folder / "quiet.py").write_text(QUIET, encoding="utf-8")
    stage.play(learner="until [ -e asked ]; do sleep 0.05; done; sleep 0.2")
    process = stage.start("--deploy.restart", "1")
    assert process.stderr is not None
    assert "the queue has not heard from the learner for 999 s: is its process stopped" in process.stderr.readline()
    (stage.folder / "back").touch()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.wait() == 0, err
    assert "the learner is heard from again" in out
    assert "has not heard" not in err
    until(lambda: not stage.alive())


def test_a_worker_of_a_run_that_is_given_up_is_not_started_again(stage: Stage) -> None:
    """The learner says why, and that once."""
    given_up = ANSWERING.replace(
        "Content-Length: 0\\r\\n\\r\\n", 'Content-Length: 16\\r\\n\\r\\n{\\"gave_up\\": \\"x\\"}'
    )
    (stage.folder / "given_up.py").write_text(given_up, encoding="utf-8")
    stage.play(
        queue=f"sleep 300 & {sys.executable} -I -S given_up.py {stage.ports['queue']}", vllm=stage.answers("vllm")
    )
    stage.play(
        worker=f"{stage.waits_for('queue')}; touch ended; exit 1",
        learner="until [ -e ended ]; do sleep 0.05; done; sleep 1; exit 1",
    )
    result = stage.run("--deploy.restart", "3")
    assert result.returncode == 1
    assert "starting it again" not in result.stderr


def test_a_database_that_is_away_for_longer_than_the_queue_waits_is_waited_for_by_the_launcher(stage: Stage) -> None:
    """The queue that is started meanwhile finds none: that is no wrong setting, and the run continues."""
    own = killable_cluster()
    try:
        (stage.folder / "real_queue.py").write_text(REAL_QUEUE, encoding="utf-8")
        stage.play(
            queue=f'exec {sys.executable} real_queue.py "$@"',
            vllm=stage.answers("vllm"),
            learner="until [ -e finish ]; do sleep 0.1; done",
        )
        root = str(Path(__file__).parents[2])
        process = stage.start("--deploy.restart", "30", "--queue.store", own.new_database(), PYTHONPATH=root)
        assert process.stdout is not None
        assert process.stderr is not None
        until(lambda: "queue answers" in process.stdout.readline())  # type: ignore[union-attr]
        own.stop()
        for attempt in (1, 2):
            told = process.stderr.readline()
            assert "queue ended with code 1: slipstream: the queue's store postgresql://" in told
            assert "could not be reached for 1 s" in told
            assert "start PostgreSQL" in told
            assert f"(restart {attempt} of 30 in a row)" in told
        own.start()
        until(lambda: "queue answers" in process.stdout.readline())  # type: ignore[union-attr]
        (stage.folder / "finish").touch()
        assert process.wait(LIMIT_S) == 0
    finally:
        own.close()
