from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from learner.ranks import stopping
from learner.ranks.stopping import Stop, Stopped

# A mutex that is locked twice: its second lock returns for no signal, as a collective with a rank that hangs. Only once
# the kernel shows the main thread in it is the test told: before that, Python would run the handler.
HANGS = """
import ctypes, os, sys, threading, time
from pathlib import Path
from learner.ranks.stopping import Stop

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


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_unwinds_and_the_second_ends_at_once(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    with Stop(20.0) as stop:
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(number)
        assert (stopped.value.code, stopped.value.halfway) == (code, False)
        assert 19 < stop.left_s <= 20
        with pytest.raises(Ended, match=str(code)):
            signal.raise_signal(number)


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

    with Stop(20.0) as stop:
        Dying()
        gc.collect()
        with pytest.raises(Stopped):
            stop.release()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("grace_s", "signals", "how"),
    [
        (0.5, [signal.SIGTERM], "has not ended within deploy.grace_s = 0.5 of it"),
        (5000.0, [signal.SIGTERM, signal.SIGINT], "has not begun to end when the second came"),
    ],
    ids=["the grace time is over", "a second signal"],
)
def test_a_main_thread_that_hears_no_signal_is_ended(grace_s: float, signals: list[signal.Signals], how: str) -> None:
    command = [sys.executable, "-c", HANGS, str(grace_s)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.5)  # of two that wait at once, the system delivers the lower number first
        try:
            _, said = process.communicate(timeout=ENDS_WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert said == f"learner: SIGTERM came, and the learner {how}: it waits for rank 1; it ends now\n"


def test_a_signal_that_the_main_thread_heeds_is_not_taken_for_one_that_it_does_not_hear() -> None:
    with Stop(20.0) as stop:
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        assert stop.signalled
    assert "signals" not in [thread.name for thread in threading.enumerate()], "its thread has ended"
    assert signal.set_wakeup_fd(-1) == -1
