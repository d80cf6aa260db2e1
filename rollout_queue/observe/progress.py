"""How long no optimiser step was made, and what became of groups since. Arrivals are not progress: a run that drops
every group gets many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from protocol import reasons
from rollout_queue.ledger.records import TicketRecord, TicketState

_STEPS = 5
_MOST_REASONS = 64


class Progress:
    """The clock of the stall alarm, in seconds. It runs from the newest step; before a session's first one from the
    moment at which learner and server are there; and it stands while the learner says that it loads."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._loading_since: float | None = None
        self.full = 0
        self.ended: Counter[str] = Counter()

    def session_began(self) -> None:
        self._since = self._loading_since = None
        self._forget()

    def all_there(self, now: float) -> None:
        """Learner and server are there."""
        if self._since is None:
            self._since = now

    def stepped(self, now: float) -> None:
        self._since = now
        self._forget()

    def loads(self, now: float) -> None:
        if self._loading_since is None:
            self._loading_since = now

    def loaded(self, now: float) -> None:
        if self._loading_since is not None and self._since is not None:
            self._since += now - max(self._since, self._loading_since)
        self._loading_since = None

    def found_full(self) -> None:
        """A group was refused for room."""
        self.full += 1

    def tickets_ended(self, records: Iterable[TicketRecord]) -> None:
        for record in records:
            if record.state in (TicketState.DROPPED, TicketState.REISSUED) and record.reason != reasons.ROLLED_BACK:
                known = record.reason in self.ended or len(self.ended) < _MOST_REASONS
                self.ended[record.reason if known and record.reason else "other"] += 1

    def quiet_s(self, now: float) -> float:
        if self._since is None:
            return 0.0
        end = now if self._loading_since is None else self._loading_since
        return max(0.0, end - self._since)

    def _forget(self) -> None:
        self.full = 0
        self.ended.clear()


def alarm_after_s(stall_after_s: float, median_step_s: float | None) -> float:
    """T of the alarm, seconds."""
    return max(stall_after_s, _STEPS * (median_step_s or 0.0))
