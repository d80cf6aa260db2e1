from __future__ import annotations

import gc
import os
import signal
import threading

import pytest

from learner import stopping
from learner.stopping import Stop, Stopped


class Ended(Exception):
    """What stands for the end of the process."""


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
    monkeypatch.setattr(stopping, "HOLD_AT_MOST_S", 0.01)
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
