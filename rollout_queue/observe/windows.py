"""Bounded windows over what happened lately: rollouts, outcomes of groups, staleness, rates. Times are in seconds.

The staleness of a group is the learner's version before the step that trains it, minus the version of its oldest token.
It splits at the group's arrival: `in_flight` passed while the group was made, `in_queue` while it waited here.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from statistics import fmean
from typing import Self, TypeVar

import msgspec

from slipstream.protocol import codec, reasons
from slipstream.protocol.messages import Group
from slipstream.protocol.rollouts import TOOL_COUNT, TOOLS_OFFERED, RolloutView
from slipstream.protocol.status import Rates, Staleness
from slipstream.rollout_queue.ledger.records import TicketRecord, TicketState

Key = TypeVar("Key", bound=Hashable)

MAX_GROUPS = 64

MAX_ROLLOUTS_PER_GROUP = 4

MAX_BYTES = 4 * 1024**2

_MAX_MESSAGES = 256 * 1024  # bytes; decoding empty containers takes a hundred times their length

_MAX_VIEW = 64 * 1024

_INTERVAL_S = 0.5

# Reasons for which a call fails by the tool's own fault; all others are the policy's.
_OF_THE_TOOL = (reasons.TOOL_RAISED, reasons.TIMEOUT)

_MAX_TOOLS = 32

_MAX_TICKETS = 16_384

WINDOW_STEPS = 20

WINDOW_S = 60.0


class Shown(msgspec.Struct, frozen=True):
    """One rollout: its reward, and its `RolloutView` in JSON."""

    reward: float
    json: bytes


def pick_rollouts(group: Group, evaluation: int | None = None) -> list[Shown]:
    """Pick a few rollouts of a group: the worst, the best and some between, of each role by themselves.

    Args:
        evaluation: Step of the evaluation that the group is of; None for training.
    """
    by_role = group.by_role().values()
    chosen: set[int] = set()
    for numbers in by_role:
        order = sorted(numbers, key=lambda number: group.rollouts[number].reward)
        count = min(max(1, MAX_ROLLOUTS_PER_GROUP // len(by_role)), len(order))
        chosen |= {order[i * (len(order) - 1) // max(1, count - 1)] for i in range(count)}
    return [_shown(group, number, evaluation) for number in sorted(chosen)]


class RecentRollouts:
    """Keeps rollouts of the newest `MAX_GROUPS` groups for people to read, within `MAX_BYTES`.

    It takes every group until it is full, then one in `_INTERVAL_S` seconds: a busy queue has no time to read more.
    """

    def __init__(self) -> None:
        self._taken_at = 0.0
        self._added = 0
        self._groups: deque[list[Shown]] = deque()
        self._bytes = 0

    def wants(self, now: float) -> bool:
        """Tell whether the next group should be picked from and added."""
        return len(self._groups) < MAX_GROUPS or now - self._taken_at >= _INTERVAL_S

    def add(self, shown: list[Shown], now: float) -> None:
        self._taken_at = now
        self._added += 1
        self._groups.append(shown)
        self._bytes += _size(shown)
        while len(self._groups) > MAX_GROUPS or self._bytes > MAX_BYTES:
            self._bytes -= _size(self._groups.popleft())

    def newer(self, added: int) -> tuple[int, list[msgspec.Raw]]:
        """Return how many groups were ever added, and the rollouts in JSON of those after the first `added`, that are
        kept, oldest first."""
        count = min(len(self._groups), self._added - added)
        groups = list(self._groups)[len(self._groups) - count :]
        return self._added, [msgspec.Raw(shown.json) for group in groups for shown in group]

    def json(self, limit: int, worst: bool) -> bytes:
        """Return at most `limit` rollouts as a JSON list of `RolloutView`: newest first, or lowest reward first if
        `worst`."""
        found = [shown for group in reversed(self._groups) for shown in group]
        if worst:
            found.sort(key=lambda shown: shown.reward)
        return codec.encode_json([msgspec.Raw(shown.json) for shown in found[:limit]])


def _shown(group: Group, number: int, evaluation: int | None) -> Shown:
    rollout = group.rollouts[number]
    readable = rollout.messages is not None and len(rollout.messages) <= _MAX_MESSAGES
    if readable:
        try:
            encoded = codec.encode_json(RolloutView.of(group, number, evaluation))
            if len(encoded) <= _MAX_VIEW:
                return Shown(rollout.reward, encoded)
        except (ValueError, OverflowError, RecursionError):
            pass  # nested too deep to be written, or a number too large: shown without its messages
    return Shown(rollout.reward, codec.encode_json(_without_messages(group, number, evaluation)))


def _without_messages(group: Group, number: int, evaluation: int | None) -> RolloutView:
    silent = msgspec.structs.replace(group.rollouts[number], messages=None)
    view = RolloutView.of(msgspec.structs.replace(group, rollouts=[silent]), 0, evaluation)
    return msgspec.structs.replace(view, number=number)


def _size(group: list[Shown]) -> int:
    return sum(len(shown.json) for shown in group)


class ToolCounts(msgspec.Struct, frozen=True):
    """Calls of a tool and their seconds; those that failed by its own fault, and those that the policy got wrong."""

    calls: int = 0
    own_failures: int = 0
    wrong_calls: int = 0
    seconds: float = 0.0


class GroupOutcome(msgspec.Struct, frozen=True):
    """The outcome of a group's episodes.

    Attributes:
        reward: Their mean reward. `equal`: whether all have the same, or all of each role.
        finished: Rollouts by finish reason.
        tools: Calls by tool. `callers`: rollouts that call any. `offered`: whether there are tools to call.
    """

    reward: float
    equal: bool
    finished: dict[str, int]
    tools: dict[str, ToolCounts] = {}
    callers: int = 0
    offered: bool = False

    @classmethod
    def of(cls, group: Group, apart: bool = False, discount: float | None = None) -> Self:
        """Make it of a group.

        Args:
            apart: Whether rewards are equal only if those of each function are.
            discount: With credit by turn, that of later rewards: then they are equal only if those at each turn are.
        """
        rewards = [rollout.reward for rollout in group.rollouts]
        counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        for rollout in group.rollouts:
            for name, value in rollout.metrics.items():
                if name.startswith("tools/") and (count := TOOL_COUNT.fullmatch(name)):
                    counts[count["tool"], count["what"]] += max(0.0, value)
        called = [tool for tool, what in counts if what == "calls"]
        tools = {tool: _tool_counts(tool, counts) for tool in called[:_MAX_TOOLS]}
        finished = Counter(str(rollout.finish_reason) for rollout in group.rollouts)
        callers = sum(rollout.tool_calls > 0 for rollout in group.rollouts)
        offered = any(TOOLS_OFFERED in rollout.metrics for rollout in group.rollouts)
        apart = (apart and group.differs_by_function) or (discount is not None and group.differs_by_turn(discount))
        equal = group.is_flat and not apart and not group.is_taught
        return cls(fmean(rewards), equal, dict(finished), tools, callers, offered)


def _tool_counts(tool: str, counts: Mapping[tuple[str, str], float]) -> ToolCounts:
    calls, failures = (int(counts.get((tool, what), 0)) for what in ("calls", "failures"))
    own = int(sum(counts.get((tool, f"failures/{reason}"), 0) for reason in _OF_THE_TOOL))
    return ToolCounts(calls, own, max(0, failures - own), counts.get((tool, "seconds"), 0.0))


class OutcomeWindow:
    """Adds up the outcomes of the newest `size` groups. Reading it costs the same for any size.

    Attributes:
        equal: Groups whose rewards are all equal. `rewards`: the rewards of these, by how many groups have each.
        finished: Rollouts by finish reason. `callers`: rollouts that call a tool.
        offered: Groups that had tools to call.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._outcomes: deque[GroupOutcome] = deque()
        self.equal = self.callers = self.offered = 0
        self.rewards: Counter[float] = Counter()
        self.finished: Counter[str] = Counter()
        self._tools: defaultdict[str, ToolCounts] = defaultdict(ToolCounts)

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, outcome: GroupOutcome) -> None:
        self._outcomes.append(outcome)
        self._count(outcome, 1)
        if len(self._outcomes) > self.size:
            self._count(self._outcomes.popleft(), -1)

    @property
    def tools(self) -> dict[str, ToolCounts]:
        """Calls by tool."""
        return dict(self._tools)

    def _count(self, outcome: GroupOutcome, sign: int) -> None:
        if outcome.equal:
            self.equal += sign
            _change(self.rewards, outcome.reward, sign)
        self.callers += sign * outcome.callers
        self.offered += sign * outcome.offered
        for reason, count in outcome.finished.items():
            _change(self.finished, reason, sign * count)
        for tool, counts in outcome.tools.items():
            known = self._tools[tool]
            names = ToolCounts.__struct_fields__
            now = ToolCounts(*(getattr(known, name) + sign * getattr(counts, name) for name in names))
            if now.calls:
                self._tools[tool] = now
            else:
                del self._tools[tool]


def _change(counts: Counter[Key], key: Key, by: int) -> None:
    """Change a count; one that is 0 again takes no room."""
    counts[key] += by
    if not counts[key]:
        del counts[key]


class TicketTimes(msgspec.Struct, gc=False):
    """When a ticket came into its states. None: not yet, or before the queue was started."""

    issued: float | None = None
    arrived: float | None = None
    leased: float | None = None
    ended: float | None = None


class NewestTickets:
    """Keeps the times of the `_MAX_TICKETS` newest tickets."""

    def __init__(self) -> None:
        self._times: dict[str, TicketTimes] = {}

    def times(self, ticket_id: str) -> TicketTimes:
        return self._times.get(ticket_id) or TicketTimes()

    def note(self, record: TicketRecord, now: float) -> TicketTimes:
        """Note the state that a ticket has come into. Returns its times."""
        if (times := self._times.get(record.id)) is None:
            times = self._times[record.id] = TicketTimes()
            if len(self._times) > _MAX_TICKETS:
                del self._times[next(iter(self._times))]
        match record.state:
            case TicketState.ISSUED:
                times.issued = now if times.issued is None else times.issued
            case TicketState.READY:  # it may have come back from the learner
                times.arrived = now if times.arrived is None else times.arrived
                times.ended = None
            case TicketState.LEASED:
                times.leased = now
            case TicketState.EVALUATED:
                times.arrived = times.ended = now
            case TicketState.TRAINED | TicketState.DROPPED | TicketState.REISSUED:
                times.ended = now
        return times


class GroupAge(msgspec.Struct, frozen=True):
    """Staleness of a group's oldest token, in versions, split at the group's arrival."""

    in_flight: int
    in_queue: int

    @property
    def total(self) -> int:
        return self.in_flight + self.in_queue

    def at_most(self, oldest: int) -> GroupAge:
        """Return the age of its oldest token that trained, where none older than `oldest` did."""
        in_queue = min(self.in_queue, oldest)
        return GroupAge(min(self.in_flight, oldest - in_queue), in_queue)


def age_of(record: TicketRecord) -> GroupAge:
    """Return the age of a trained group. Raises ValueError for any other."""
    if record.trained_version is None:
        raise ValueError(f"ticket {record.id} was not trained")
    return GroupAge(
        in_flight=record.arrival_version - record.group.oldest_version,
        in_queue=record.trained_version - 1 - record.arrival_version,
    )


class StalenessWindow:
    """Keeps the ages of the groups of the newest `WINDOW_STEPS` steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[GroupAge, ...]] = deque(maxlen=WINDOW_STEPS)
        self._maxima: deque[int] = deque(maxlen=WINDOW_STEPS)

    def add_step(self, trained: Iterable[TicketRecord], reported_max: int | None) -> int:
        """Add one step's groups. Returns the staleness of the oldest.

        Args:
            reported_max: The learner's own maximum, which counts instead: it knows which tokens it masked.
        """
        ages = tuple(age_of(record) for record in trained)
        oldest = max((age.total for age in ages), default=0)
        self._steps.append(ages if reported_max is None else tuple(age.at_most(reported_max) for age in ages))
        self._maxima.append(oldest if reported_max is None else reported_max)
        return oldest

    def summary(self, max_ever: int) -> Staleness:
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


class RateMeter:
    """Counts events in one-second buckets, so that its memory does not grow with the rate.

    Args:
        now: Time at the start, seconds: rates of the first minute are over the time since then.
    """

    def __init__(self, now: float) -> None:
        self._started = now
        self._buckets: deque[tuple[int, Counter[str]]] = deque()

    def add(self, now: float, **events: int) -> None:
        second = int(now)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append((second, Counter()))
        self._buckets[-1][1].update(events)
        self._forget(now)

    def rates(self, now: float) -> Rates:
        self._forget(now)
        total: Counter[str] = Counter()
        for _, counts in self._buckets:
            total.update(counts)
        span = max(1.0, min(WINDOW_S, now - self._started))
        return Rates(**{name: total[name] / span for name in Rates.__struct_fields__})

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < now - WINDOW_S:
            self._buckets.popleft()
