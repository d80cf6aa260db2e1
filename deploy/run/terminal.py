"""Writes to a run's terminal: the supervisor's messages, a live line with what it waits for, the learner's output.

Only one of them writes at a time. The live line ends for good when the learner prints for the first time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

# Seconds between updates of the live line, and between messages if the output is no terminal.
DRAW_EVERY_S = 1.0

SAY_EVERY_S = 30.0

_READ_BYTES = 64 * 1024


@dataclass(frozen=True)
class Wait:
    """A wait of the supervisor for `who` since `since`, seconds on the terminal's clock. `log`: log file to look at."""

    who: str
    since: float
    log: Path | None = None


class Terminal:
    """The terminal of a run. Use it as a context manager, and run `keep_telling` during the work.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: list[Wait] = []
        self._up: list[str] = []
        self._someone = asyncio.Event()
        self._said_at = clock()
        self._live: Live | None = None
        self._may_draw = sys.stdout.isatty()
        self._relay: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pass_on()
        self._erase()
        if self._relay is not None:
            os.close(self._relay)

    def say(self, text: str) -> None:
        self._print(text, sys.stdout)

    def complain(self, text: str) -> None:
        self._print(text, sys.stderr)

    @contextlib.contextmanager
    def waiting_for(self, who: str, log: Path | None = None) -> Iterator[None]:
        """Show that the supervisor waits for `who` until the block ends."""
        wait = Wait(who, self._clock(), log)
        if not self._waits:
            self._said_at = wait.since
        self._waits.append(wait)
        self._someone.set()
        try:
            yield
        finally:
            self._waits.remove(wait)
            if not self._waits:
                self._someone.clear()
                self._erase()

    def up(self, name: str) -> None:
        """Note that the process answers, or runs and has no route to ask."""
        self._up.append(name)

    def down(self, name: str) -> None:
        """Note that the process has ended."""
        self._up = [other for other in self._up if other != name]

    async def keep_telling(self) -> None:
        """Update the live line until cancelled."""
        while True:
            await self._someone.wait()
            await asyncio.sleep(DRAW_EVERY_S)
            self.tell()

    def tell(self) -> None:
        """Draw the live line, or print it as a message if one is due."""
        now = self._clock()
        if not self._waits:
            return
        if self._may_draw:
            if self._live is None:
                self._live = Live(console=Console(), auto_refresh=False, transient=True)
                self._live.start()
            text = Text(f"slipstream: {line(self._waits, self._up, now)}", no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)
        elif now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            self.say(line(self._waits, self._up, now, logs=True))

    @contextlib.contextmanager
    def learners_stdout(self) -> Iterator[int | None]:
        """Give the descriptor to start the learner with; None for this process's stdout.

        On a terminal it is a pseudo-terminal of the same size whose output passes through here, so that the learner's
        own live line works.
        """
        if not sys.stdout.isatty():
            yield None
            return
        self._relay, theirs = pty.openpty()
        try:
            tty.setraw(theirs)  # the outer terminal translates line ends
            self.resize()
            os.set_blocking(self._relay, False)
            asyncio.get_running_loop().add_reader(self._relay, self.pass_on)
            yield theirs
        finally:
            os.close(theirs)

    def resize(self) -> None:
        """Give the learner's terminal the size of ours. Call it on SIGWINCH."""
        if self._relay is not None:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._relay, termios.TIOCSWINSZ, fcntl.ioctl(sys.stdout, termios.TIOCGWINSZ, b"\0" * 8))

    def pass_on(self) -> None:
        """Write out what the learner has printed so far."""
        while self._relay is not None:
            try:
                printed = os.read(self._relay, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the learner has ended
                printed = b""
            if not printed:
                with contextlib.suppress(RuntimeError):  # the loop may have ended
                    asyncio.get_running_loop().remove_reader(self._relay)
                return
            self._may_draw = False
            self._erase()
            with contextlib.suppress(OSError):
                sys.stdout.buffer.write(printed)
                sys.stdout.buffer.flush()

    def _erase(self) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def _print(self, text: str, stream: TextIO) -> None:
        self._erase()
        # On a terminal the learner's live line may be in this place.
        erase = "\r\x1b[2K" if stream.isatty() else ""
        with contextlib.suppress(OSError):  # a run must stop even if its terminal is gone
            print(f"{erase}slipstream: {text}", file=stream, flush=True)


def line(waits: list[Wait], up: list[str], now: float, logs: bool = False) -> str:
    """Describe the open waits with their seconds, and the processes that are up. `logs`: whether to name log files."""
    waiting = [
        f"{wait.who} for {now - wait.since:.0f} s{f' (its log: {wait.log})' if logs and wait.log else ''}"
        for wait in waits
    ]
    return f"waiting for {', '.join(waiting)}" + (f"; up: {', '.join(up)}" if up else "")
