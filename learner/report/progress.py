"""The live line of a run; in a log file, a line every few steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from learner.report.record import StepRecord
from protocol.status import Status

PRINT_EVERY_STEPS = 10
PRINT_EVERY_S = 30.0
STATUS_EVERY_S = 5.0


class Progress:
    """Shows steps as they are done. `status` asks the queue, at most once in a few seconds."""

    def __init__(
        self,
        total_steps: int,
        status: Callable[[], Status],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._total_steps = total_steps
        self._status = status
        self._clock = clock
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._printed_at = -float("inf")
        self._asked_at = -float("inf")
        self._depth = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.out(text, highlight=False)

    def show(self, record: StepRecord) -> None:
        """Show a step that is done."""
        now = self._clock()
        last = record.step == self._total_steps
        due = record.step % PRINT_EVERY_STEPS == 0 or last or now - self._printed_at >= PRINT_EVERY_S
        if self._live is None and not due:
            return
        if now - self._asked_at >= STATUS_EVERY_S:
            self._asked_at, self._depth = now, self._status().depth
        text = line(record, self._total_steps, self._depth)
        if self._live is not None:
            self._live.update(Text(text, no_wrap=True), refresh=True)
        else:
            self._printed_at = now
            self.say(text)


def line(record: StepRecord, total_steps: int, depth: float) -> str:
    """depth: groups outstanding at the queue, in optimiser steps."""
    tally, times = record.tally, record.times
    return (
        f"step {record.step:>{len(str(total_steps))}}/{total_steps} | reward {tally.reward_mean:.3f} | "
        f"staleness {tally.staleness_mean:.2f} (max {tally.staleness_max}) | depth {depth:.1f} | "
        f"{tally.tokens_sampled / times.step_s:,.0f} tokens/s | {times.step_s:.2f} s, "
        f"{times.wait_s / times.step_s:.0%} waiting"
    )
