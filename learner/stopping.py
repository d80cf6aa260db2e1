"""Ctrl-C and SIGTERM: the learner ends at once, but never between the two halves of a change."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A change that is not done so long after a signal waits for a queue that does not answer.
HOLD_AT_MOST_S = 5.0


class Stopped(SystemExit):
    """A signal asked for the end. `code`: 128 and the signal's number."""

    def __init__(self, code: int, halfway: bool = False) -> None:
        super().__init__(code)
        self.halfway = halfway  # in a change that would not end


class Stop:
    """While it is entered, the first signal raises `Stopped` in the main thread, at once or as `hold` ends; the second
    one ends the process on the spot. A signal that is ignored (nohup) stays ignored."""

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._signalled_at: float | None = None
        self._code = 0
        self._held = False
        self._at_most_s = HOLD_AT_MOST_S
        self._overdue = False

    def __enter__(self) -> Self:
        found = {number: signal.getsignal(number) for number in SIGNALS}
        self._before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._on_signal)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.unraisablehook = self._hook
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def left_s(self) -> float:
        """Seconds until what has not ended is killed."""
        if self._signalled_at is None:
            return self._grace_s
        return self._signalled_at + self._grace_s - self._clock()

    @property
    def signalled(self) -> bool:
        return self._signalled_at is not None

    def hold(self, at_most_s: float = HOLD_AT_MOST_S) -> None:
        """From here on a signal waits for `release`, for at most `at_most_s` from when it came."""
        self._held, self._at_most_s = True, at_most_s

    def release(self) -> None:
        """Raises `Stopped` if a signal came meanwhile, or one got lost in code that swallows exceptions."""
        self._held = False
        if self._signalled_at is not None:
            raise Stopped(self._code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._overdue:
            self._overdue = False
            raise Stopped(self._code, halfway=True)
        if self._signalled_at is not None:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the cursor, which the live line hides
            os._exit(128 + number)
        self._signalled_at, self._code = self._clock(), 128 + number
        if not self._held:
            raise Stopped(self._code)
        timer = threading.Timer(self._at_most_s, self._end_hold, [number])
        timer.daemon = True
        timer.start()

    def _end_hold(self, number: int) -> None:
        if self._held:
            self._held, self._overdue = False, True
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _on_unraisable(self, unraisable: Any) -> None:
        """`Stopped` was raised in a finaliser, where Python can only report it: `release` raises it again."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._hook(unraisable)
