"""What follows from the end of a child: it is done, it is started again, or the run is over. No I/O."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from deploy.programs import Role

# The exit code for a wrong setting: the process would only end in the same way again.
WRONG_SETTING = 2
# The exit codes of a process that was stopped on purpose.
STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM))
# What has been up so long does not count as dying in a row.
STEADY_AFTER_S = 60.0
MAX_PAUSE_S = 60.0


@dataclass(frozen=True)
class Done:
    """It had nothing left to do: a worker ends with 0 only once the run is finished."""


@dataclass(frozen=True)
class Again:
    """It is started again after `pause_s`, for the `attempt`-th time in a row."""

    pause_s: float
    attempt: int


@dataclass(frozen=True)
class Over:
    """The run ends with `code`. `why`: what to say besides how the child ended; `remedy`: what to do; both or either
    may be empty."""

    code: int
    why: str = ""
    remedy: str = ""


Verdict = Done | Again | Over


class RestartPolicy:
    """A vLLM server, a worker or the queue is started again up to `times` in a row; the learner's end ends the run.

    `to_go_on`: what to do after the learner's end, asked for when it has ended; `clock`: seconds, monotonic.
    """

    def __init__(self, times: int, to_go_on: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self.times = times
        self._to_go_on = to_go_on
        self._clock = clock
        self._in_a_row: Counter[str] = Counter()
        self._up_since: dict[str, float] = {}
        self._was_up: set[str] = set()

    def up(self, name: str) -> None:
        """It answers, or was started where it has no route to ask."""
        self._up_since[name] = self._clock()
        self._was_up.add(name)

    def ended(self, name: str, role: Role, code: int, goes_on: bool = False) -> Verdict:
        """`code`: the exit code, 128 + n for signal n. A server or a queue has no good reason to end, not even 0.

        `goes_on`: the run is not finished, so that a worker has none either.
        """
        up_since = self._up_since.pop(name, None)
        if code == 0 and role in ("worker", "learner") and not goes_on:
            return Done()
        code = code or 1
        if role == "learner":
            return Over(code, remedy="" if code in (WRONG_SETTING, *STOPPED) else self._to_go_on())
        if code == WRONG_SETTING:
            return Over(code, "(a wrong setting)")
        if role == "vllm" and name not in self._was_up:
            return Over(code, "before it ever answered")
        if up_since is not None and self._clock() - up_since >= STEADY_AFTER_S:
            self._in_a_row[name] = 0
        if self._in_a_row[name] >= self.times:
            return Over(code, f"once more than deploy.restart = {self.times} allows" if self.times else "")
        self._in_a_row[name] += 1
        attempt = self._in_a_row[name]
        return Again(min(MAX_PAUSE_S, 2.0 ** min(attempt - 1, 10)), attempt)
