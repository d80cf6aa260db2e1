"""When to give up: the first groups of a session fail, one and all.

Only failures that would come again count. A server that went away and a worker that was stopped do not: the run is made
to survive them.
"""

from __future__ import annotations

from collections import Counter

from protocol import reasons
from protocol.config import RunConfig
from rollout_queue.ledger.refusal import Refusal

_PASSING = frozenset(
    {
        reasons.failed(reasons.SERVER),
        reasons.failed(reasons.LOST),
        reasons.failed(reasons.WORKER_STOPPED),
        reasons.rejected(reasons.UNVERIFIED_SERVER),
    }
)
_KINDS = {reasons.NO_REWARD: reasons.REWARD}  # the trouble that a reason belongs to, where it is called otherwise
_MOST_TROUBLES = 64
_TEXT = 500
_REASON = 80


class Trial:
    """One session's first groups. `gave_up`: why the run can go no further, once it is clear."""

    def __init__(self, config: RunConfig) -> None:
        self._after = config.rollout.give_up_after
        self._task = config.task.path
        self.begin()

    def begin(self) -> None:
        """A new session: count from nothing."""
        self.gave_up: str | None = None
        self._passed = False
        self._failures: Counter[str] = Counter()
        self._details: dict[str, str] = {}
        self._troubles: dict[str, str] = {}

    def trouble(self, kind: str, text: str) -> None:
        """A worker's first failure of a kind: it tells more than a ticket's reason."""
        if len(self._troubles) < _MOST_TROUBLES:
            self._troubles.setdefault(kind, text[:_TEXT])

    def succeeded(self) -> None:
        """A group was accepted."""
        self._passed = True

    def failed(self, reason: str, detail: str) -> bool:
        """A ticket ended without a group for `reason`; true if the run is given up by it."""
        if self._passed or self.gave_up is not None or not self._after or reason in _PASSING:
            return False
        self._failures[reason] += 1
        self._details.setdefault(reason, detail[:_TEXT])
        if self._failures.total() < self._after:
            return False
        self.gave_up = self._why()
        return True

    def check(self) -> None:
        """Refuses (GAVE_UP) once the run is given up."""
        if self.gave_up is not None:
            raise Refusal(reasons.GAVE_UP, self.gave_up)

    def _why(self) -> str:
        count = self._failures.total()
        reason, times = self._failures.most_common(1)[0]
        shown = reason[:_REASON]
        share = "all" if times == count else f"{times} of them"
        code = reason.removeprefix(reasons.failed(""))
        detail = self._troubles.get(_KINDS.get(code, code)) or self._details[reason] or "no detail was given"
        return (
            f"the first {count} groups failed, {share} for {shown}: {detail}. Mend it in the task {self._task} or the "
            f"run file, then start again (rollout.give_up_after = {self._after} failures end a run in which no group "
            f"has succeeded; 0: never)"
        )
