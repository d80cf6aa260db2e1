"""Ctrl-C, SIGTERM and SIGHUP end the learner, but never between the two halves of a change.

Ctrl-C sets no time limit: a person waits, and a second Ctrl-C ends the process at once. After SIGTERM or SIGHUP
something else kills the process when the grace time is over.

Python runs a signal's handler in the main thread, between two instructions: never, if the main thread is in a call that
does not return, as in a collective with a rank that hangs. So a thread listens for signals too, and ends the process
at the second Ctrl-C, or when the grace time is over.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn, Self

from slipstream.protocol import log_lines

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A change that is not done this long after a signal waits for a queue that does not answer.
HOLD_AT_MAX_S = 5.0

# Two SIGINT within this time are one Ctrl-C, which came from the terminal and from a program that passes it on.
ONE_PRESS_S = 0.5

LAST_WORDS_WITHIN_S = 2.0

# A finaliser that a signal came into has ended this long after it, and the signal is raised again.
LOST_AFTER_S = 0.1

SHOW_CURSOR = b"\x1b[?25h\n"  # which the live line hides


class LearnerFailed(RuntimeError):
    """The learner cannot continue; the text says why, and what to do."""


class Stopped(BaseException):
    """A signal asked for the end. Not a `SystemExit`, which code around libraries that call `sys.exit` catches.

    Attributes:
        code: 128 plus the signal's number.
        halfway: Stopped in a change that did not end.
    """

    def __init__(self, code: int, halfway: bool = False) -> None:
        super().__init__(code)
        self.code, self.halfway = code, halfway


class Requests:
    """Decides what a signal asks for, given those before it.

    Args:
        one_press_s: Two SIGINT within this time count as one.
    """

    def __init__(self, one_press_s: float = ONE_PRESS_S) -> None:
        self._one_press_s = one_press_s
        self._pressed_at = -inf
        self._any = False
        self.limited = False

    def take(self, number: int, now: float) -> Literal["stop", "limit", "give up"] | None:
        """Return what the signal asks for.

        Args:
            number: The signal.
            now: When it came, monotonic seconds.

        Returns:
            "stop" for the first one; "limit" for one that sets a time limit after a Ctrl-C; "give up" for a Ctrl-C
            after any other; None for one that changes nothing.
        """
        first, self._any = not self._any, True
        pressed_at, limited = self._pressed_at, self.limited
        if number == signal.SIGINT:
            self._pressed_at = now
        else:
            self.limited = True
        if first:
            return "stop"
        if number == signal.SIGINT:
            return "give up" if now - pressed_at >= self._one_press_s else None
        return None if limited else "limit"


class Stop:
    """Turns signals into the end of the run while it is entered.

    The first signal raises `Stopped` in the main thread, at once or when a `hold` ends. A Ctrl-C after it ends the
    process on the spot, and so does the end of the grace time, unless only Ctrl-C was pressed. A signal that is ignored
    (nohup) stays ignored. `Stopped` leaves it as `SystemExit`.

    Attributes:
        last: Called on a thread right before the process ends by itself; returns what the main thread may be waiting
            for, if that is known.
        unfinished: What the process leaves undone if it ends by itself now, and how to resume; None before that is
            known.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.last: Callable[[], str | None] = lambda: None
        self.unfinished: str | None = None
        self._requests = Requests()
        self._asked_at: float | None = None
        self._limited_at: float | None = None
        self._signalled = False
        self._code = 0
        self._held = self._patient = self._finishing = False
        self._max_hold_s = HOLD_AT_MAX_S
        self._overdue = self._lost = False
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
        self._lost = False
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken)
        self._theirs.close()
        self._thread.join()
        self._ours.close()
        if isinstance(error, Stopped):
            raise SystemExit(error.code) from None

    @property
    def left_s(self) -> float:
        """Seconds until a process that has not ended is killed; infinite after Ctrl-C alone."""
        if self._limited_at is not None:
            return self._limited_at + self._grace_s - time.monotonic()
        return inf if self._signalled else self._grace_s

    @property
    def asked(self) -> bool:
        """Whether a signal has come, even if the main thread does not know of it yet."""
        return self._asked_at is not None

    @property
    def signalled(self) -> bool:
        return self._signalled

    def hold(self, max_hold_s: float | None = None) -> None:
        """Make a signal wait for `release`, for at most `max_hold_s` from when it came. After Ctrl-C it waits for as
        long as it takes, unless `max_hold_s` is left out: then the limit is `HOLD_AT_MAX_S` for all signals."""
        self._held, self._max_hold_s = True, HOLD_AT_MAX_S if max_hold_s is None else max_hold_s
        self._patient = max_hold_s is not None

    def release(self) -> None:
        """Raise `Stopped` if a signal came meanwhile, or one got lost in code that swallows exceptions."""
        self._held = False
        if self._signalled and not self._finishing:
            self._lost = False  # once is enough: a second one would come into the last checkpoint
            raise Stopped(self._code)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Make a signal wait until the block ends: what is half-way would be begun again."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
        self.release()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._overdue:
            self._overdue = False
            raise Stopped(self._code, halfway=True)
        if self._lost:
            self._lost = False
            if not self._held and not self._finishing:
                raise Stopped(self._code)
        if self._signalled:  # the thread decides what follows from a further one
            return
        self._signalled, self._code = True, 128 + number
        if number != signal.SIGINT and self._limited_at is None:
            self._limited_at = time.monotonic()
        if self._finishing:
            return
        if not self._held:
            raise Stopped(self._code)
        if number != signal.SIGINT or not self._patient:
            self._limit_hold(number)

    def _limit_hold(self, number: int) -> None:
        timer = threading.Timer(self._max_hold_s, self._end_hold, [number])
        timer.daemon = True
        timer.start()

    def _end_hold(self, number: int) -> None:
        if self._held and not self._finishing:
            self._held, self._overdue = False, True
            self._send_to_itself(number)

    def _send_to_itself(self, number: int) -> None:
        self._own += 1
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _listen(self) -> None:
        """Listen for signals, whatever the main thread does. Ends the process when it is given up, or when the time
        is over."""
        told = False
        while True:
            if not select.select([self._ours], [], [], self._wait_s(told))[0]:
                if self._limited_at is not None:
                    self._end(f"has not ended within deploy.grace_s = {self._grace_s:g} of it")
                told = True
                if not self._signalled:
                    self._say(f"{self._waits_for()}; Ctrl-C again ends it now, without a checkpoint")
                continue
            numbers = self._ours.recv(64)
            if not numbers:
                return
            for number in numbers:
                if number not in self._before:
                    continue
                if self._own:
                    self._own -= 1
                    continue
                match self._requests.take(number, time.monotonic()):
                    case "stop":
                        self._asked_at, self._code = time.monotonic(), 128 + number
                        self._limited_at = self._asked_at if self._requests.limited else None
                    case "limit":
                        self._limited_at = time.monotonic()
                        if self._held:
                            self._limit_hold(number)
                    case "give up":
                        self._end("was given up by a second signal")
                    case None:
                        pass

    def _wait_s(self, told: bool) -> float | None:
        """Return how long to listen until something is due; None if nothing is."""
        if self._limited_at is not None:
            return max(0.0, self.left_s)
        return None if self._asked_at is None or told else self._grace_s

    def _end(self, how: str) -> NoReturn:
        name = signal.Signals(self._code - 128).name
        what = self.unfinished or self._waits_for()
        end_now(self._code, f"learner: {name} came, and the learner {how}: {what}; it ends now", on_terminal=True)

    def _say(self, text: str) -> None:
        with suppress(OSError):
            print(f"learner: {text}", file=sys.stderr, flush=True)

    def _waits_for(self) -> str:
        known = self.last()
        return f"it waits for {known}" if known else "it is in a call that does not return, or needs longer"

    def _on_unraisable(self, unraisable: Any) -> None:
        """`Stopped` was raised in a finaliser, where Python can only report it: raise it again after that."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._hook(unraisable)
            return
        self._lost = True
        timer = threading.Timer(LOST_AFTER_S, self._raise_lost)
        timer.daemon = True
        timer.start()

    def _raise_lost(self) -> None:
        if self._lost:
            self._send_to_itself(self._code - 128)


def end_now(code: int, text: str, on_terminal: bool = False) -> NoReturn:
    """End the process on the spot, from any thread, and write `text` to the log. A terminal that is held is not waited
    for.

    Args:
        on_terminal: Whether the text goes to the terminal too, as nobody else shows it there.
    """

    def say() -> None:
        _show_cursor()
        for stream in (sys.stderr, sys.stdout) if on_terminal and log_lines.is_apart() else (sys.stderr,):
            with suppress(OSError, ValueError):
                print(text, file=stream, flush=True)

    words = threading.Thread(target=say, daemon=True)
    words.start()
    words.join(LAST_WORDS_WITHIN_S)
    os._exit(code)


def _show_cursor() -> None:
    with suppress(OSError, ValueError):  # a stdout that is closed, or is not a file
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR)
