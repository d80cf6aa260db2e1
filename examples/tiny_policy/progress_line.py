"""Shows the progress of the warm start: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0


class ProgressLine:
    """Shows progress while its context is open."""

    def __init__(self) -> None:
        columns = (TextColumn("warm start"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns)
        self._bar = self._progress.add_task("clean demonstrations", total=100)
        self._began = self._last = time.monotonic()
        self._reached = 0.0

    def __enter__(self) -> Self:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, percent: float, text: str) -> None:
        """Show the progress, which never goes back: a success rate may.

        Args:
            percent: Finished part, 0 to 100.
            text: Name of the current work.
        """
        self._reached = percent = min(100.0, max(self._reached, percent))
        if self._progress.console.is_terminal:
            self._progress.update(self._bar, completed=percent, description=text)
            return
        now = time.monotonic()
        if now - self._last >= LINE_EVERY_S or percent >= 100:
            self._last = now
            print(f"warm start: {percent:.0f} %, {text}, {now - self._began:.0f} s", file=sys.stderr, flush=True)
