from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.learner.ranks import stopping
from slipstream.learner.ranks.stopping import Requests, Stop, Stopped

# A mutex that is locked twice: its second lock returns for no signal, as a collective with a rank that hangs. Only once
# the kernel shows the main thread in it is the test told: before that, Python would run the handler.
HANGS = """
import ctypes, os, sys, threading, time
from pathlib import Path
from slipstream.learner.ranks.stopping import Stop

mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock

def tell(address):
    call = Path(f"/proc/self/task/{os.getpid()}/syscall")
    while address not in call.read_text():
        time.sleep(0.01)
    print("hangs", flush=True)

with Stop(float(sys.argv[1])) as stop:
    stop.last = lambda: "rank 1"
    lock(mutex)
    threading.Thread(target=tell, args=(hex(ctypes.addressof(mutex)),), daemon=True).start()
    lock(mutex)
"""
ENDS_WITHIN_S = 60.0


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("signals", "asked"),
    [
        ([(0, INT), (3, INT)], ["stop", "give up"]),
        ([(0, INT), (0.1, INT), (0.5, INT), (0.9, INT)], ["stop", None, None, None]),
        ([(0, INT), (0.1, INT), (1, INT)], ["stop", None, "give up"]),
        ([(0, INT), (3, TERM), (4, TERM), (5, INT)], ["stop", "limit", None, "give up"]),
        ([(0, TERM), (0, TERM), (5, TERM)], ["stop", None, None]),
        ([(0, HUP), (0, TERM)], ["stop", None]),
        ([(0, TERM), (0, INT)], ["stop", "give up"]),
    ],
)
def test_what_signals_ask_for(signals: list[tuple[float, int]], asked: list[str | None]) -> None:
    """A scheduler and a supervisor may both send SIGTERM: only a person gives up."""
    requests = Requests()
    assert [requests.take(number, 100 + at) for at, number in signals] == asked


@pytest.mark.parametrize(
    ("number", "code", "left_s"), [(INT, 130, math.inf), (TERM, 143, pytest.approx(20, abs=1)), (HUP, 129, 20)]
)
def test_the_first_signal_unwinds(number: signal.Signals, code: int, left_s: float) -> None:
    with Stop(20.0) as stop:
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(number)
        assert (stopped.value.code, stopped.value.halfway) == (code, False)
        assert stop.left_s == pytest.approx(left_s, abs=1)


def test_a_checkpoint_that_is_being_written_is_finished_before_a_signal_is_heeded() -> None:
    done = []

    def write(stop: Stop) -> None:
        with stop.finishing():
            signal.raise_signal(TERM)
            stop.hold(0.0)
            stop.release()
            done.append("written")
        done.append("the signal was lost")

    with Stop(20.0) as stop, pytest.raises(Stopped):
        write(stop)
    assert done == ["written"]


def test_ctrl_c_waits_for_a_change_of_all_ranks_and_sigterm_after_it_sets_a_limit() -> None:
    def limit() -> None:
        signal.raise_signal(TERM)
        threading.Event().wait(5)

    with Stop(20.0) as stop:
        stop.hold(0.01)
        signal.raise_signal(INT)
        threading.Event().wait(0.3)
        with pytest.raises(Stopped) as stopped:
            limit()
        assert stopped.value.halfway
        assert stop.left_s <= 20


def test_a_signal_waits_for_the_end_of_a_change() -> None:
    with Stop(20.0) as stop:
        stop.release()
        stop.hold()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            stop.release()
        assert not stopped.value.halfway


def test_a_change_that_does_not_end_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "HOLD_AT_MAX_S", 0.01)
    with Stop(20.0) as stop:
        stop.hold()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped) as stopped:
            threading.Event().wait(5)
        assert stopped.value.halfway


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As under nohup, or for a job in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop(20.0):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_in_a_finaliser_is_not_lost_and_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def waits() -> None:
        Dying()
        gc.collect()
        threading.Event().wait(20)

    with Stop(20.0), pytest.raises(Stopped):
        waits()
    assert capfd.readouterr().err == ""


def test_a_signal_that_was_lost_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would come into the last checkpoint."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(stopping, "LOST_AFTER_S", 0.5)
    with Stop(20.0) as stop:
        Dying()
        with pytest.raises(Stopped):
            stop.release()
        time.sleep(1.0)


@pytest.mark.parametrize("swallows", [Exception, SystemExit, OSError])
def test_code_that_swallows_what_libraries_raise_does_not_swallow_a_signal(swallows: type[BaseException]) -> None:
    """As the line on the terminal, the trackers and the callbacks do."""
    with pytest.raises(SystemExit) as ended, Stop(20.0), contextlib.suppress(swallows):
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("grace_s", "signals", "said"),
    [
        (
            0.5,
            [TERM],
            ["SIGTERM came, and the learner has not ended within deploy.grace_s = 0.5 of it: {}; it ends now"],
        ),
        (5000.0, [TERM, INT], ["SIGTERM came, and the learner was given up by a second signal: {}; it ends now"]),
        (
            0.5,
            [INT, INT],
            [
                "{}; Ctrl-C again ends it now, without a checkpoint",
                "SIGINT came, and the learner was given up by a second signal: {}; it ends now",
            ],
        ),
    ],
    ids=["the grace time is over", "a second signal", "Ctrl-C sets no limit"],
)
def test_a_main_thread_that_hears_no_signal_is_ended(
    grace_s: float, signals: list[signal.Signals], said: list[str]
) -> None:
    command = [sys.executable, "-c", HANGS, str(grace_s)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(1.0)  # of two that wait at once, the system delivers the lower number first
        try:
            shown, printed = process.communicate(timeout=ENDS_WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signals[0]
    assert shown == printed.splitlines(True)[-1], "on the terminal too, where the log is not"
    assert printed.splitlines() == [f"learner: {line}".format("it waits for rank 1") for line in said]


def test_a_signal_that_the_main_thread_heeds_is_not_taken_for_one_that_it_does_not_hear() -> None:
    with Stop(20.0) as stop:
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        assert stop.signalled
    assert "signals" not in [thread.name for thread in threading.enumerate()], "its thread has ended"
    assert signal.set_wakeup_fd(-1) == -1
