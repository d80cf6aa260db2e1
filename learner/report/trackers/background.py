"""One tracker in a thread of its own: what it does, or fails to do, never holds or ends the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue

from accelerate.tracking import GeneralTracker

# Steps that wait for a tracker that does not answer. What comes when there are so many is lost, and counted.
MOST_WAITING = 1000

Job = Callable[[GeneralTracker], None]


class Background:
    """`start` makes the tracker, in the thread; `warn` tells a person, from whatever thread, and once.

    The thread is a daemon: a process that ends does not wait for a tracker that hangs.
    """

    def __init__(
        self, name: str, start: Callable[[], GeneralTracker], warn: Callable[[str], None], most: int = MOST_WAITING
    ) -> None:
        self.name = name
        self.lost = 0
        self._start = start
        self._warn = warn
        self._warned = False
        self._jobs: Queue[Job | None] = Queue(most)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Have it done; where too much waits already, it is lost."""
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._lose(f"it has not answered while {self._jobs.maxsize} lines came")

    def close(self, timeout_s: float) -> None:
        """Let it do what waits, at most so long, and end."""
        ends = time.monotonic() + timeout_s
        with suppress(Full):
            self._jobs.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, ends - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._jobs.qsize()
            self._warn(
                f"tracker {self.name} did not end within {timeout_s:g} s; it may lack {waiting} of the run's lines"
            )
        elif self.lost:
            self._warn(f"tracker {self.name} lacks {self.lost} of the run's lines; metrics.jsonl has them all")

    def _run(self) -> None:
        tracker = self._started()
        while (job := self._jobs.get()) is not None:
            if tracker is None:
                self.lost += 1
                continue
            try:
                job(tracker)
            except (Exception, SystemExit) as error:
                self._lose(_said(error))
        if tracker is not None:
            try:
                tracker.finish()
            except (Exception, SystemExit) as error:
                self._say(_said(error))

    def _started(self) -> GeneralTracker | None:
        try:
            return self._start()
        except (Exception, SystemExit) as error:  # of many types; some libraries leave by sys.exit
            self._say(_said(error))
            return None

    def _lose(self, why: str) -> None:
        self.lost += 1
        self._say(why)

    def _say(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"tracker {self.name}: {why}; the run goes on, and metrics.jsonl has every step")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
