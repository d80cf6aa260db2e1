"""Gives up a run whose first rows all fail, at every worker that works on any.

Only failures that would come again count. A server that went away and a stopped worker do not: a run survives them. Nor
does a body that no worker of ours sends: anybody may have sent it. One group that was ever accepted, in this session or
before, shows that task and settings work; if it comes late, the run continues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from slipstream.protocol import reasons
from slipstream.protocol.config import RunConfig
from slipstream.rollout_queue.ledger.records import Refusal, TicketRecord
from slipstream.rollout_queue.observe.causes import explaining_kind, where_to_fix
from slipstream.rollout_queue.observe.symptoms import PASSING

_MAX_TEXTS = 64

_MAX_TEXT_CHARACTERS = 500

_MAX_REASON_CHARACTERS = 80


class EarlyFailureCheck:
    """Counts failures of a run's first rows. `gave_up`: why the run is given up; None while it is not."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._after = config.rollout.give_up_after
        self.begin(passed=False)

    def begin(self, passed: bool) -> None:
        """Start counting again, as the queue or a session starts. `passed`: the run has accepted a group before."""
        self.gave_up: str | None = None
        self._passed = passed
        self._rows: dict[int, str] = {}  # reason of each of the first rows that failed
        self._failing: set[str] = set()  # workers
        self._details: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def add_text(self, kind: str, text: str) -> None:
        """Keep a worker's text about its first failure of a kind: it says more than a ticket's reason."""
        if len(self._texts) < _MAX_TEXTS:
            self._texts.setdefault(kind, text[:_MAX_TEXT_CHARACTERS])

    def succeeded(self) -> None:
        """Note that a group was accepted."""
        self._passed, self.gave_up = True, None

    def failed(self, ended: TicketRecord, reason: str, detail: str, out: Iterable[TicketRecord]) -> bool:
        """Count a ticket that ended without a group.

        Args:
            ended: The ticket.
            reason: Why it ended; `detail` is the worker's text.
            out: Tickets that workers hold. A worker without a failure that holds one may yet succeed.

        Returns:
            Whether the run is given up by it.
        """
        if self._passed or self.gave_up is not None or not self._after or reason in PASSING:
            return False
        self._failing.add(ended.worker_id)
        if ended.index not in self._rows and len(self._rows) < self._after:
            self._rows[ended.index] = reason
            self._details.setdefault(reason, detail[:_MAX_TEXT_CHARACTERS])
        if len(self._rows) < self._after or any(record.worker_id not in self._failing for record in out):
            return False
        self.gave_up = self._why()
        return True

    def check_not_given_up(self) -> None:
        """Refuse requests once the run is given up (GAVE_UP)."""
        if self.gave_up is not None:
            raise Refusal(reasons.GAVE_UP, self.gave_up)

    def _why(self) -> str:
        count = len(self._rows)
        reason, times = Counter(self._rows.values()).most_common(1)[0]
        shown = reason[:_MAX_REASON_CHARACTERS]
        share = "all" if times == count else f"{times} of them"
        detail = self._texts.get(explaining_kind(reason)) or self._details[reason] or "no detail was given"
        return (
            f"the first {count} groups failed, {share} for {shown}: {detail}. Fix it "
            f"{where_to_fix(reason, self._config)}, then start again "
            f"(rollout.give_up_after = {self._after} failed rows end a run in which no group has succeeded; 0: never)"
        )
