"""How old groups are when they are trained, and where they aged.

The staleness of a group is the learner's version before the step that trains it, minus the version of its oldest token.
It splits at the group's arrival: `in_flight` passed while the group was made, `in_queue` while it waited here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from protocol.status import Staleness
from rollout_queue.ledger.records import TicketRecord

WINDOW_STEPS = 20


class GroupAge(msgspec.Struct, frozen=True):
    in_flight: int
    in_queue: int

    @property
    def total(self) -> int:
        return self.in_flight + self.in_queue


def age_of(record: TicketRecord) -> GroupAge:
    """Age of a trained group, in versions."""
    if record.trained_version is None:
        raise ValueError(f"ticket {record.id} was not trained")
    return GroupAge(
        in_flight=record.arrival_version - record.group.oldest_version,
        in_queue=record.trained_version - 1 - record.arrival_version,
    )


class StalenessWindow:
    """Ages of the groups of the newest `WINDOW_STEPS` steps.

    The largest staleness is the learner's own figure where it gives one: it knows which tokens it masked.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[GroupAge, ...]] = deque(maxlen=WINDOW_STEPS)
        self._maxima: deque[int] = deque(maxlen=WINDOW_STEPS)

    def add_step(self, trained: Iterable[TicketRecord], reported_max: int | None) -> int:
        """Take in one step's groups; returns the staleness of the oldest."""
        ages = tuple(age_of(record) for record in trained)
        oldest = max((age.total for age in ages), default=0)
        self._steps.append(ages)
        self._maxima.append(oldest if reported_max is None else reported_max)
        return oldest

    def figures(self, max_ever: int) -> Staleness:
        ages = [age for step in self._steps for age in step]
        if not ages:
            return Staleness(max_ever=max_ever)
        return Staleness(
            mean=sum(age.total for age in ages) / len(ages),
            max=max(self._maxima),
            max_ever=max(max_ever, *self._maxima),
            in_flight_mean=sum(age.in_flight for age in ages) / len(ages),
            in_queue_mean=sum(age.in_queue for age in ages) / len(ages),
        )
