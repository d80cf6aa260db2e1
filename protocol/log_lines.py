"""Keeps a process's log readable: of warnings that are alike, the first few of half a minute are written, and the
others counted in one line."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# So many lines that differ only in numbers are written within `WITHIN_S` seconds.
ALIKE = 5
WITHIN_S = 30.0

# Characters of a line that its count quotes.
_QUOTED = 160

# Numbers, and the like of request ids and addresses of objects.
_NUMBERS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")


def set_up() -> None:
    """Send this process's log to stderr, from the level of `SLIPSTREAM_LOG` on, unless it goes somewhere already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Repeated(handler))
    logging.basicConfig(level=os.environ.get("SLIPSTREAM_LOG", "INFO").upper(), format=FORMAT, handlers=[handler])


@dataclass
class _Seen:
    record: logging.LogRecord
    since: float
    count: int = 0


class Repeated(logging.Filter):
    """A filter of one handler, which also writes what it has counted."""

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._handler = handler
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int, str], _Seen] = {}
        self._timer: threading.Timer | None = None
        atexit.register(self.tell, at_once=True)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or isinstance(record, _Counted):
            return True
        self.tell()
        key = (record.name, record.levelno, _NUMBERS.sub("0", record.getMessage()))
        with self._lock:
            seen = self._seen.setdefault(key, _Seen(record, self._clock()))
            seen.count += 1
            if seen.count > ALIKE:
                self._tell_later()
            return seen.count <= ALIKE

    def tell(self, at_once: bool = False) -> None:
        """Write how many lines were left out where the time is over. `at_once`: everywhere."""
        now = self._clock()
        with self._lock:
            over = [key for key, seen in self._seen.items() if at_once or now - seen.since >= WITHIN_S]
            found = [self._seen.pop(key) for key in over]
        for seen in found:
            if (more := seen.count - ALIKE) > 0:
                self._handler.handle(_Counted(seen.record, more, now - seen.since))

    def _tell_later(self) -> None:
        """See to the count of lines that none may follow. Under the lock."""
        if self._timer is None:
            self._timer = threading.Timer(WITHIN_S, self._timer_ends)
            self._timer.daemon = True
            self._timer.start()

    def _timer_ends(self) -> None:
        with self._lock:
            self._timer = None
        self.tell()
        with self._lock:
            if any(seen.count > ALIKE for seen in self._seen.values()):
                self._tell_later()


class _Counted(logging.LogRecord):
    """The line that stands for those that were left out."""

    def __init__(self, like: logging.LogRecord, more: int, seconds: float) -> None:
        text = f"and {more:,} more like it in {seconds:.0f} s: {like.getMessage().partition(chr(10))[0][:_QUOTED]}"
        super().__init__(like.name, like.levelno, like.pathname, like.lineno, text, None, None)


def is_apart() -> bool:
    """Return whether stderr, where the log goes, is another file than stdout, where the terminal is."""
    try:
        return not os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return True
