"""`slipstream up`, with stand-ins for the processes: whatever stops it, nothing that it started is left."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.deploy.stage import LIMIT_S, STAYS, STUBBORN, Stage, until


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
    process = stage.start("--deploy.restart", "9", FIRST_PAUSE_S="60")
    assert process.stderr is not None
    if act == "preflight":
        until(stage.children)
    else:
        assert "starting it again in 60 s" in process.stderr.readline()
    process.terminate()
    assert process.wait(LIMIT_S) == 143
    until(lambda: not stage.alive())


@pytest.mark.parametrize("pause_s", [0.0, 1.2])
def test_several_ctrl_c_during_the_check_end_it(stage: Stage, pause_s: float) -> None:
    """At once they are one, as of a terminal and of a program that passes it on; later the second ends all."""
    stage.play(preflight=STUBBORN)
    process = stage.start("--deploy.grace_s", "1" if pause_s == 0 else "500")
    until(stage.children)
    for _ in range(3):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(pause_s)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    first, *further = err.splitlines()
    assert first.startswith("slipstream: interrupted, stopping; what has not ended in")
    assert ["interrupted again, ending at once" in line for line in further] == ([True] if pause_s else [])
    assert not stage.run_dir.exists()
    until(lambda: not stage.alive())


# A learner that needs 3 s for its checkpoint, and says which signals it got.
SAVES = """
said() { echo "$1" >>signals; }
save() { for _ in $(seq 30); do sleep 0.1; done; echo saved >>signals; exit 130; }
trap 'said INT; save' INT; trap 'said TERM' TERM
sleep 300 & echo $! >>children
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("further", "code", "said"),
    [
        ([], 130, ["INT", "saved"]),
        ([signal.SIGINT], 130, ["INT", "INT", "TERM"]),
        ([signal.SIGTERM], 130, ["INT", "TERM"]),
        ([signal.SIGHUP], 130, ["INT", "TERM"]),
    ],
    ids=["one Ctrl-C", "a second gives up", "SIGTERM limits it", "a terminal that closes limits it"],
)
def test_ctrl_c_waits_for_the_learner(stage: Stage, further: list[signal.Signals], code: int, said: list[str]) -> None:
    """However short the grace time is."""
    stage.play(learner=SAVES)
    process = stage.start("--deploy.grace_s", "0.2")
    until(lambda: len(stage.children()) == 4)
    os.killpg(process.pid, signal.SIGINT)
    for number in further:
        time.sleep(1.2)
        os.killpg(process.pid, number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert (stage.folder / "signals").read_text().split() == said
    until(lambda: not stage.alive())


def test_a_signal_that_is_ignored_stays_ignored(stage: Stage) -> None:
    """As nohup wants it."""
    process = stage.start(ignore=[signal.SIGHUP])
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


def test_a_server_holds_nothing_to_save_and_gets_no_long_grace(stage: Stage) -> None:
    stage.play(vllm=STUBBORN)
    process = stage.start("--deploy.grace_s", "60")
    until(lambda: len(stage.children()) == 4)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130


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
    """Processes that ignore SIGTERM are ended, too."""
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
