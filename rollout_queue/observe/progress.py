"""How long no optimiser step was made, and what became of groups since. Arrivals are not progress: a run that drops
every group gets many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from protocol import reasons
from rollout_queue.ledger.records import TicketRecord, TicketState

_STEPS = 5
_FIRST_STEP = 10
_MOST_REASONS = 64


class Progress:
    """The clock of the stall alarm, in seconds. It runs from the newest step; before a session's first one, and before
    the first after a restart of the queue, from the moment at which learner and server are there.

    It stands while they start and while the learner says that it loads, but each for `start_s` at most: from the start,
    or from when the learner that loads was last heard from. What takes longer never comes.
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

    def all_there(self, now: float) -> None:
        """Learner and server are there."""
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
        """A sign of life from the learner."""
        if self._loading:
            self._stands_until = now + self._start_s

    def loaded(self, now: float) -> None:
        self._loading = False
        self._go_on(now)

    def found_full(self) -> None:
        """A group was refused for room."""
        self.full += 1

    def tickets_ended(self, records: Iterable[TicketRecord]) -> None:
        for record in records:
            if record.state in (TicketState.DROPPED, TicketState.REISSUED) and record.reason != reasons.ROLLED_BACK:
                known = record.reason in self.ended or len(self.ended) < _MOST_REASONS
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
    """T of the alarm, seconds. `trains`: the learner holds the groups of a step. How long one takes is not known before
    the first, nor after a restart of the queue."""
    if median_step_s is None:
        return stall_after_s * (_FIRST_STEP if trains else 1)
    return max(stall_after_s, _STEPS * median_step_s)
