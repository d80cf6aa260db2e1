"""Shared by the commands that follow a run elsewhere: signals that wait until the command asks for them, and patience
with a scheduler that does not answer."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stops:
    """Holds these signals back within its context, but for those that are ignored, as under nohup.

    A mask would not do: it is one thread's, and libraries have their own threads, by which the signal would come.
    """

    def __enter__(self) -> Stops:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        handled = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, lambda *_: None) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> signal.Signals | None:
        """Return a signal that has come, or comes within `seconds`."""
        select.select([self._read], [], [], seconds)
        try:
            came = os.read(self._read, 64)
        except BlockingIOError:
            return None
        return next((signal.Signals(number) for number in came if number in self._before), None)


class Silence:
    """How long a scheduler has not answered. Tells once that it does not, and once that it does again.

    Args:
        followed: What is followed, for the lines.
        scheduler: Its name.
        limit_s: Seconds that are borne.
    """

    def __init__(self, followed: str, scheduler: str, limit_s: float) -> None:
        self._followed, self._scheduler, self._limit_s = followed, scheduler, limit_s
        self._answered = time.monotonic()
        self._is_told = False

    def answered(self) -> None:
        """Note an answer."""
        if self._is_told:
            self._say(f"{self._scheduler} answers again")
        self._answered, self._is_told = time.monotonic(), False

    def lasts(self, error: Exception) -> bool:
        """Note that there was none, and return whether that has lasted for longer than is borne."""
        if not self._is_told:
            self._say(f"{self._scheduler} does not answer, asking again: {error}")
        self._is_told = True
        return time.monotonic() - self._answered > self._limit_s

    def _say(self, text: str) -> None:
        print(f"{self._followed}: {text}", file=sys.stderr, flush=True)
