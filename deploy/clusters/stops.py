"""Ctrl-C, SIGTERM and SIGHUP of a command that follows a run elsewhere: they wait until it asks for them."""

from __future__ import annotations

import os
import select
import signal
from types import TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stops:
    """Holds these signals back within its context, but for those that are ignored, as under nohup.

    A mask would not do: it is one thread's, and libraries have threads of their own, by which the signal would come.
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
