"""Collects what the diagnosis looks at, and remembers since when each cause has been seen. Times are in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.collapse import CAUSE, WINDOW_STEPS, Collapse, Row, find_collapse
from slipstream.protocol.status import Cause
from slipstream.rollout_queue.observe.windows import GroupOutcome, OutcomeWindow

WINDOW_GROUPS = 400

_MIN_IN_A_ROW = 16

_STEPS_IN_A_ROW = 4

# Groups from which a share is taken, and the share of them whose rewards differed before an update that is blamed.
_MIN_SEEN, _SOME = 8, 0.3

# The update is blamed for equal rewards in a row from this probability of as many by chance.
_MAX_CHANCE = 1e-4

# Seconds for which a cause stays that is over: at first, and at most.
HOLD_S, MAX_HOLD_S = 120.0, 1800.0

# Causes that begin and end with an event, so that none of them is near a limit.
_EVENTS = ("refused workers", "checkpoints", CAUSE)

# Causes whose times are remembered; far more than there are kinds, as tools and reasons have names.
_MAX_CAUSES = 256

# Failures that come and go with a process, and say nothing of task and settings.
PASSING = frozenset(
    {
        reasons.failed(reasons.SERVER),
        reasons.failed(reasons.UNVERIFIED_SERVER),
        reasons.failed(reasons.LOST),
        reasons.failed(reasons.WORKER_STOPPED),
        reasons.rejected(reasons.UNVERIFIED_SERVER),
        reasons.rejected(reasons.UNDECODABLE),
        reasons.rejected(reasons.TOO_DEEP),
        reasons.rejected(reasons.TICKET_MISMATCH),
        reasons.rejected(reasons.WORKER_MISMATCH),
    }
)


@dataclass
class SuddenlyEqual:
    """Compares the groups since a step with those before it.

    A policy that samples for itself (a staleness of 0) may be destroyed so far that no group is worth a step. No later
    step shows it then.

    Attributes:
        step: The step's figures.
        varied, compared: Groups before it whose rewards differ, of how many.
        groups, rewards: Groups since then, and the sum of their mean rewards.
    """

    step: Row
    varied: int
    compared: int
    groups: int = 0
    rewards: float = 0.0


class Symptoms:
    """Collects what the diagnosis looks at. Kept in memory only: after a restart of the queue it fills again.

    Args:
        groups_per_step: Groups per optimiser step.

    Attributes:
        newest: Groups of the last few steps. `longer`: of the last `WINDOW_GROUPS`.
        equal_in_a_row: Newest groups in a row whose rewards are all equal.
        tickets: How the newest tickets ended: the reason of a failure, "" for a group.
        flat_steps: Newest steps in a row whose gradient was 0.
        collapse: The update that destroyed the policy; None before, and once the reward is better than before it.
        sudden: The newest step, if its update seems to have made all rewards equal; see `SuddenlyEqual`.
        checkpoint_failure: Why the newest checkpoint could not be written; None if it was.
    """

    def __init__(self, groups_per_step: int) -> None:
        self.patience = max(_MIN_IN_A_ROW, _STEPS_IN_A_ROW * groups_per_step)
        self.patience_steps = max(_STEPS_IN_A_ROW, -(-_MIN_IN_A_ROW // groups_per_step))
        size = min(self.patience, WINDOW_GROUPS)
        self.newest, self.longer = OutcomeWindow(size), OutcomeWindow(WINDOW_GROUPS)
        self.equal_in_a_row = 0
        self.tickets: deque[str] = deque(maxlen=size)
        self.flat_steps = 0
        self.collapse: Collapse | None = None
        self._steps: deque[Row] = deque(maxlen=WINDOW_STEPS)
        self._earned = 0.0
        self._since: SuddenlyEqual | None = None
        self.checkpoint_failure: str | None = None

    def group_came(self, outcome: GroupOutcome) -> None:
        """Note a group of the training that was accepted."""
        self.newest.add(outcome)
        self.longer.add(outcome)
        self.equal_in_a_row = self.equal_in_a_row + 1 if outcome.equal else 0
        self.tickets.append("")
        if self._since is not None:
            self._since.groups += 1
            self._since.rewards += outcome.reward

    @property
    def sudden(self) -> SuddenlyEqual | None:
        since = self._since
        if since is None or min(since.groups, self.equal_in_a_row) < self.patience:
            return None
        equal_share = (since.compared - since.varied + 1) / (since.compared + 2)
        varied_before = since.compared >= _MIN_SEEN and since.varied >= _SOME * since.compared
        by_chance = equal_share ** min(since.groups, self.equal_in_a_row) > _MAX_CHANCE
        return (
            since
            if varied_before and not by_chance and since.rewards / since.groups <= (since.step.get("reward") or 0.0)
            else None
        )

    def ticket_failed(self, reason: str) -> None:
        """Note a ticket of the training that ended without a group."""
        if reason not in PASSING:
            self.tickets.append(reason)

    def stepped(self, row: Row) -> None:
        """Note a step. `row`: its figures, as of `slipstream.protocol.collapse`."""
        self.flat_steps = self.flat_steps + 1 if row.get("grad_norm") == 0 else 0
        self._steps.append(row)
        self._since = SuddenlyEqual(row, len(self.newest) - self.newest.equal, len(self.newest))
        if self.collapse is None:
            self.collapse = find_collapse([*self._steps])
            before = [reward for of in self._steps if (reward := of.get("reward")) is not None and of is not row]
            self._earned = median(before) if before else 0.0
        elif (row.get("reward") or 0.0) > self._earned:
            self.collapse = None

    def session_began(self) -> None:
        """Forget what a new session of the learner tries again."""
        self.flat_steps, self.checkpoint_failure, self.collapse, self._since = 0, None, None, None
        self._steps.clear()


@dataclass
class _Seen:
    cause: Cause
    since: float
    first_at: float
    seen_at: float
    times: int = 1
    held: bool = True

    @property
    def hold_s(self) -> float:
        return 0.0 if self.cause.about in _EVENTS else min(HOLD_S * 2.0 ** (self.times - 1), MAX_HOLD_S)


class CauseTimes:
    """Remembers since when each cause has been seen, and how often it came back.

    A cause that is over stays for `HOLD_S`, and twice as long each time that it has come back, at most `MAX_HOLD_S`:
    what is near its limit would come and go. One that gave way to another cause goes at once.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def timed(self, causes: Sequence[Cause], now: float) -> list[Cause]:
        """Return the causes that hold now or did lately, with their times. `now`: current time, seconds."""
        held = {about for about, seen in self._seen.items() if seen.held}
        gave_way = any(cause.about not in held for cause in causes)
        for cause in causes:
            seen = self._seen.get(cause.about)
            if seen is None:
                seen = self._seen[cause.about] = _Seen(cause, now, now, now)
            elif not seen.held:
                seen.since, seen.times = now, seen.times + 1
            seen.cause, seen.seen_at, seen.held = cause, now, True
        abouts = {cause.about for cause in causes}
        for about in held - abouts:
            seen = self._seen[about]
            seen.held = not gave_way and now - seen.seen_at < seen.hold_s
        lately = [seen.cause for about, seen in self._seen.items() if seen.held and about not in abouts]
        while len(self._seen) > _MAX_CAUSES:
            del self._seen[next(iter(self._seen))]
        return [self._timed(cause, now) for cause in (*causes, *lately)]

    def _timed(self, cause: Cause, now: float) -> Cause:
        seen = self._seen[cause.about]
        return msgspec.structs.replace(cause, since_s=now - seen.since, times=seen.times, first_s=now - seen.first_at)
