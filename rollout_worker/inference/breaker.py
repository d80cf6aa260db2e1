"""Failures in a row at one server: after a few it is left alone for a while, then tried by one request. Pure."""

from __future__ import annotations

from enum import Enum

FAILURES = 3
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0


class _State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    TRIAL_DUE = "trial due"
    ON_TRIAL = "on trial"


class Breaker:
    """One server's. It opens after `FAILURES` in a row, or at once where every request would fail alike; its pause
    doubles with each trial that fails, from `PAUSE_S` to `PAUSE_MAX_S` seconds."""

    def __init__(self) -> None:
        self.failures = 0
        self._state = _State.CLOSED
        self._pause_s = PAUSE_S

    @property
    def admits(self) -> bool:
        """Whether a request may go to the server now."""
        return self._state in (_State.CLOSED, _State.TRIAL_DUE)

    def began(self) -> bool:
        """A request goes to the server; true if it is the trial."""
        if self._state is _State.TRIAL_DUE:
            self._state = _State.ON_TRIAL
            return True
        return False

    def failed(self, for_all: bool = False, trial: bool = False) -> float | None:
        """A request failed. Seconds of the pause if one begins. `for_all`: each request would fail so."""
        self.failures += 1
        if trial:
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        elif self._state is not _State.CLOSED or (self.failures < FAILURES and not for_all):
            return None
        self._state = _State.OPEN
        return self._pause_s

    def succeeded(self) -> None:
        """The server answered as it should."""
        self.failures, self._state, self._pause_s = 0, _State.CLOSED, PAUSE_S

    def undecided(self, trial: bool) -> None:
        """A request was given up before it ended; if it was the trial, another one is due."""
        if trial:
            self._state = _State.TRIAL_DUE

    def pause_over(self) -> None:
        if self._state is _State.OPEN:
            self._state = _State.TRIAL_DUE
