"""Measures the time without an optimiser step: only steps count as progress.

Arrivals do not count, nor does work in flight: a run that drops every group has plenty of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from slipstream.protocol import reasons
from slipstream.rollout_queue.ledger.records import TicketRecord, TicketState

_STEPS = 5

_FIRST_STEP = 10

_MAX_REASONS = 64


class StepProgress:
    """Measures the time without an optimiser step, and counts what happened to groups meanwhile.

    The time runs from the newest step. Before the first step of a session, and after a restart of the queue, it runs
    from the moment at which there are a learner and a serving server. It stands while these start and while the
    learner says that it loads, each for at most `start_s`: after that nothing is expected to come.

    Args:
        now: Current time, seconds; also in all methods.
        start_s: Maximum time to start, or to load since the learner was last heard from.

    Attributes:
        full: Groups refused for lack of room since the newest step.
        ended: Tickets that ended untrained since the newest step, by reason.
    """

    def __init__(self, now: float, start_s: float) -> None:
        self._start_s = start_s
        self.full = 0
        self.ended: Counter[str] = Counter()
        self.session_began(now)

    def session_began(self, now: float) -> None:
        self._starting, self._loading = True, False
        self._since = now
        self._stands_since: float | None = now
        self._stands_until = now + self._start_s
        self._forget()

    def expect_steps(self, now: float) -> None:
        """Note that there are a learner and a serving server, so that steps can be expected."""
        if self._starting:
            self._starting = False
            self._since = now
            self._go_on(now)

    def stepped(self, now: float) -> None:
        self._since = now
        self._forget()

    def loads(self, now: float) -> None:
        self._loading = True
        if self._stands_since is None:
            self._stands_since = now
        self._stands_until = now + self._start_s

    def heard(self, now: float) -> None:
        """Note a sign of life from the learner."""
        if self._loading:
            self._stands_until = now + self._start_s

    def loaded(self, now: float) -> None:
        self._loading = False
        self._go_on(now)

    def found_full(self) -> None:
        """Note that a group was refused for lack of room."""
        self.full += 1

    def tickets_ended(self, records: Iterable[TicketRecord]) -> None:
        for record in records:
            if record.state in (TicketState.DROPPED, TicketState.REISSUED) and record.reason != reasons.ROLLED_BACK:
                known = record.reason in self.ended or len(self.ended) < _MAX_REASONS
                self.ended[record.reason if known and record.reason else "other"] += 1

    def quiet_s(self, now: float) -> float:
        return now - self._since - self._stood_s(now)

    def _go_on(self, now: float) -> None:
        if not self._starting and not self._loading:
            self._since += self._stood_s(now)
            self._stands_since = None

    def _stood_s(self, now: float) -> float:
        if self._stands_since is None:
            return 0.0
        return max(0.0, min(now, self._stands_until) - max(self._since, self._stands_since))

    def _forget(self) -> None:
        self.full = 0
        self.ended.clear()


def alarm_after_s(stall_after_s: float, median_step_s: float | None, trains: bool) -> float:
    """Return the time without a step after which the alarm is raised, seconds.

    Args:
        stall_after_s: The setting.
        median_step_s: Median time of the newest steps; None before the first, and after a restart of the queue.
        trains: Whether the learner holds the groups of a step. A first step may take long.
    """
    if median_step_s is None:
        return stall_after_s * (_FIRST_STEP if trains else 1)
    return max(stall_after_s, _STEPS * median_step_s)
