"""Ctrl-C and SIGTERM end the learner at once, but never between the two halves of a change.

Python runs a signal's handler in the main thread, between two instructions: never, if the main thread is in a call that
does not return, as in a collective with a rank that hangs. So a thread listens for signals too, and ends the process
when the grace time is over.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

# A change that is not done this long after a signal waits for a queue that does not answer.
HOLD_AT_MAX_S = 5.0

# Longer than a main thread that runs Python code needs to call the handler.
HANDLED_WITHIN_S = 0.5

LAST_WORDS_WITHIN_S = 2.0

SHOW_CURSOR = b"\x1b[?25h\n"  # which the live line hides


class LearnerFailed(RuntimeError):
    """The learner cannot continue; the text says why, and what to do."""


class Stopped(SystemExit):
    """A signal asked for the end. `code`: 128 plus the signal's number."""

    def __init__(self, code: int, halfway: bool = False) -> None:
        super().__init__(code)
        self.halfway = halfway  # stopped in a change that did not end


class Stop:
    """Turns signals into the end of the run while it is entered.

    The first signal raises `Stopped` in the main thread, at once or when a `hold` ends. The second one ends the process
    on the spot, and so does the end of the grace time. A signal that is ignored (nohup) stays ignored.

    Attributes:
        last: Called on a thread right before the process ends by itself; returns what the main thread may be waiting
            for, if that is known.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.last: Callable[[], str | None] = lambda: None
        self._asked_at: float | None = None
        self._signalled_at: float | None = None
        self._code = 0
        self._held = False
        self._max_hold_s = HOLD_AT_MAX_S
        self._overdue = False
        self._handled = 0
        self._own = 0  # signals that this object has sent itself

    def __enter__(self) -> Self:
        found = {number: signal.getsignal(number) for number in SIGNALS}
        self._before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
        # Python's own handler, in C, writes a signal's number there at once, whatever the main thread does.
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._woken = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
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
        signal.set_wakeup_fd(self._woken)
        self._theirs.close()
        self._thread.join()
        self._ours.close()

    @property
    def left_s(self) -> float:
        """Seconds until a process that has not ended is killed."""
        since = self._signalled_at if self._asked_at is None else self._asked_at
        return self._grace_s if since is None else since + self._grace_s - time.monotonic()

    @property
    def asked(self) -> bool:
        """Whether a signal has come, even if the main thread does not know of it yet."""
        return self._asked_at is not None

    @property
    def signalled(self) -> bool:
        return self._signalled_at is not None

    def hold(self, max_hold_s: float | None = None) -> None:
        """Make a signal wait for `release`, for at most `max_hold_s` (`HOLD_AT_MAX_S`) from when it came."""
        self._held, self._max_hold_s = True, HOLD_AT_MAX_S if max_hold_s is None else max_hold_s

    def release(self) -> None:
        """Raise `Stopped` if a signal came meanwhile, or one got lost in code that swallows exceptions."""
        self._held = False
        if self._signalled_at is not None:
            raise Stopped(self._code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._overdue:
            self._overdue = False
            raise Stopped(self._code, halfway=True)
        self._handled += 1
        if self._signalled_at is not None:
            _show_cursor()
            os._exit(128 + number)
        self._signalled_at, self._code = time.monotonic(), 128 + number
        if not self._held:
            raise Stopped(self._code)
        timer = threading.Timer(self._max_hold_s, self._end_hold, [number])
        timer.daemon = True
        timer.start()

    def _end_hold(self, number: int) -> None:
        if self._held:
            self._held, self._overdue = False, True
            self._own += 1
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _listen(self) -> None:
        """Listen for signals, whatever the main thread does. Ends the process on the second, or when the time
        is over."""
        came = 0
        while True:
            if not select.select([self._ours], [], [], None if not came else max(0.0, self.left_s))[0]:
                self._end(f"has not ended within deploy.grace_s = {self._grace_s:g} of it")
            numbers = self._ours.recv(64)
            if not numbers:
                return
            for number in numbers:
                if number not in self._before:
                    continue
                if self._own:
                    self._own -= 1
                    continue
                came += 1
                if came == 1:
                    self._asked_at, self._code = time.monotonic(), 128 + number
                    continue
                select.select([self._ours], [], [], HANDLED_WITHIN_S)
                if self._handled < came:
                    self._end("has not begun to end when the second came")

    def _end(self, how: str) -> NoReturn:
        name = signal.Signals(self._code - 128).name
        end_now(self._code, f"learner: {name} came, and the learner {how}: {self._waits_for()}; it ends now")

    def _waits_for(self) -> str:
        known = self.last()
        return f"it waits for {known}" if known else "it is in a call that does not return, or needs longer"

    def _on_unraisable(self, unraisable: Any) -> None:
        """`Stopped` was raised in a finaliser, where Python can only report it: `release` raises it again."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._hook(unraisable)


def end_now(code: int, text: str) -> NoReturn:
    """End the process on the spot, from any thread. A terminal that is held is not waited for."""

    def say() -> None:
        _show_cursor()
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    words = threading.Thread(target=say, daemon=True)
    words.start()
    words.join(LAST_WORDS_WITHIN_S)
    os._exit(code)


def _show_cursor() -> None:
    with suppress(OSError, ValueError):  # a stdout that is closed, or is not a file
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR)
