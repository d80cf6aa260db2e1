"""Says what limits a run, by who waits for whom: of the run under way, and of one that `slipstream plan` simulates.

Per second of the run the learner is busy for l seconds and a worker's slot for g, and overlap = l + g - 1 of them pass
with both busy, if that is above 0. With either of them at twice its speed the second becomes

    l + g - min(overlap, l, g) + the time with neither busy

where l or g is halved. What the others would bring follows from the time for which both wait at all, min(1 - l, 1 - g):
only the staleness bound, a publication, or episodes in tools and judgement can keep both. Where that is long, the
number of groups under way is given, and a part's share of the time that one takes decides (Little's law). The part that
brings most limits. What one more server, worker or rank brings follows in the same way, from the speed that it adds.
`tests/deploy/planning/test_limits.py` compares both with simulations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec

from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import LearnerReport
from slipstream.protocol.status import Limit, LimitingPart, Scaling
from slipstream.rollout_queue.observe.notices import printable
from slipstream.rollout_queue.observe.windows import ToolCounts

# A part that would bring less, as a share of the run's speed, is not named.
_MIN_GAIN = 0.05

# Where learner and servers must take turns, that is named from this gain on, whatever faster servers would bring: one
# version of staleness takes no machine.
_FREE_GAIN = 0.15

# Share of slots' time from which on they count as taken, and idle share from which on the maximum of open episodes
# decides how many there are.
_TAKEN, _CROWDED = 0.8, 0.1

# Share of time for which both learner and slots wait, from which on the number of groups decides how fast a run is.
_HELD_BACK = 0.2

# What servers sample more with twice the requests: from which share on slots are named, and the share where none was
# measured. It is that of a server of which half of a token's time grows with the requests.
_MIN_MORE, _ASSUMED_MORE = 0.1, 1 / 3

# What publications may take of the servers' tokens/s before fewer of them are advised, and with the advised number.
_TAKES_MUCH, _TAKES_LITTLE = 0.1, 0.075

# One more is wanted if it brings this part of its share of the speed; one fewer, if that costs less than the second.
_WORTH_IT, _NOT_WORTH_IT = 0.5, 0.25

_WINDOW_S, _MIN_WINDOW_S, _BUCKET_S = 300.0, 20.0, 10.0

# Steps that count, and how many there must be.
_WINDOW_STEPS, _MIN_STEPS = 20, 3


class LimitInputs(msgspec.Struct, frozen=True):
    """Facts from which the limit follows. All but slots and requests are shares, 0 to 1.

    Attributes:
        learner_wait: Of the learner's time, for groups.
        ticket_wait: Of the time of workers' slots, for tickets. `open_wait`: because no more episodes may be open.
        in_tools, in_judgement: Of the time of open episodes, but for those that wait for the rest of their group.
        publishing: Of all time, with a version on its way that a server does not have yet.
        published: Of what servers would sample, what publications take.
        slots: Of all workers. `requests`: how many all servers would run at once.
        more: How much more the servers sample with twice the slots.
    """

    learner_wait: float
    ticket_wait: float
    open_wait: float
    in_tools: float
    in_judgement: float
    publishing: float
    slots: int
    requests: int
    more: float = _ASSUMED_MORE
    published: float = 0.0
    slowest_tool: str | None = None


def limit_of(inputs: LimitInputs, config: RunConfig) -> Limit:
    """Name the part that limits the run, in a sentence with its figures. `part` is None if none does by itself."""
    gains = _gains(inputs, config)
    best = max(gains, key=gains.__getitem__)
    part = best if gains[best] >= _MIN_GAIN else None
    if part == "servers" and not _bound(config)[0] and gains["staleness bound"] >= _FREE_GAIN:
        part = "staleness bound"
    taken = 1 - inputs.ticket_wait - inputs.open_wait >= _TAKEN
    if part == "servers" and taken and inputs.slots < inputs.requests and inputs.more >= _MIN_MORE:
        part = "workers' slots"
    waits = (
        f"the learner waits {inputs.learner_wait:.0%} of its time for groups, the workers' slots "
        f"{inputs.ticket_wait:.0%} of theirs for tickets"
    )
    match part:
        case "learner":
            head, tail = "The learner limits", ""
        case "servers":
            head, tail = "The vLLM servers limit", _publications(inputs.published, config.weight_sync.every)
        case "workers' slots":
            head = "The workers' slots limit"
            tail = f"; all {inputs.slots:,} are taken, and the servers would run {inputs.requests:,} requests at once"
        case "tools":
            slowest = f", {inputs.slowest_tool}" if inputs.slowest_tool else ""
            head, tail = "Tools limit", f"; episodes pass {inputs.in_tools:.0%} of their time in tools{slowest}"
        case "judge":
            head, tail = "The judge limits", f"; episodes pass {inputs.in_judgement:.0%} of their time in judgement"
        case "publication":
            head = "Publication limits"
            tail = f"; a version is on its way to the servers {inputs.publishing:.0%} of the time"
        case "staleness bound":
            head, tail = "The staleness bound limits", f"; {_bound(config)[1]}"
        case None:
            head, tail = "No part by itself limits", ""
    return Limit(part, f"{head} the run: {waits}{tail}.")


def _publications(share: float, every: int) -> str:
    """Advise the fewest steps between publications with which these take little of what servers sample."""
    if share < _TAKES_MUCH:
        return ""
    fewer = every * math.ceil(share / _TAKES_LITTLE)
    return f"; publications take {share:.0%} of what they would sample: raise weight_sync.every = {every} to {fewer}"


def scaling_of(inputs: LimitInputs, config: RunConfig, servers: int, workers: int, ranks: int) -> Scaling:
    """Estimate what one more server, worker or learner rank brings, and say how many to keep.

    Args:
        servers, workers, ranks: How many there are, each at least 1.
    """
    one_more = {
        "server": _gain(inputs, config, _with_servers(inputs, servers, 1)),
        "worker": _gain(inputs, config, _with_workers(inputs, servers, workers, 1)),
        # As if ranks cost one another nothing.
        "rank": _gain(inputs, config, _Speeds(learner=(ranks + 1) / ranks)),
    }
    fewer_servers = fewer_workers = 0.0
    if servers > 1:
        fewer_servers = _gain(inputs, config, _with_servers(inputs, servers, -1))
    if workers > 1:
        fewer_workers = _gain(inputs, config, _with_workers(inputs, servers, workers, -1))
    return Scaling(
        one_more,
        _wanted(servers, one_more["server"], fewer_servers),
        min(_wanted(workers, one_more["worker"], fewer_workers), config.queue.max_workers),
    )


def slowest_tool(tools: Mapping[str, ToolCounts]) -> str | None:
    """Name the tool that takes most of the time of all calls, with its share; None if no call was timed."""
    total = sum(counts.seconds for counts in tools.values())
    if not total:
        return None
    name = max(tools, key=lambda tool: tools[tool].seconds)
    took = tools[name].seconds
    return f"{took / total:.0%} of that in {printable(name)}, {took / tools[name].calls:.2g} s a call"


def _gains(inputs: LimitInputs, config: RunConfig) -> dict[LimitingPart, float]:
    """Estimate the gain of steps a second from each part at twice its speed, and from one version more of staleness."""
    learner, slots = 1 - inputs.learner_wait, 1 - inputs.ticket_wait
    overlap, neither = max(0.0, learner + slots - 1), max(0.0, 1 - learner - slots)
    both_wait = min(inputs.learner_wait, inputs.ticket_wait)

    def period(learner: float, slots: float, neither: float) -> float:
        return learner + slots - min(overlap, learner, slots) + neither

    tools, judge = inputs.in_tools, inputs.in_judgement
    sampling = max(0.0, 1 - tools - judge)
    if inputs.open_wait >= _CROWDED:
        # The number of open episodes is given, so slots are busy by how long an episode takes in all.
        crowded_by = {"servers": sampling * slots, "tools": tools * slots, "judge": judge * slots}
    else:
        crowded_by = {"servers": slots - inputs.open_wait, "tools": 0.0, "judge": 0.0}
    # While neither is busy and no version is on its way, the last episodes of a group or a step are awaited.
    last = max(0.0, neither - inputs.publishing) * sampling
    bound, _ = _bound(config)
    periods: dict[LimitingPart, float] = {
        "learner": period(learner / 2, slots, neither),
        "servers": period(learner, slots - crowded_by["servers"] / 2, neither - last / 2),
        "tools": period(learner, slots - crowded_by["tools"] / 2, neither) - both_wait * tools / 2,
        "judge": period(learner, slots - crowded_by["judge"] / 2, neither) - both_wait * judge / 2,
        "publication": 1 - min(both_wait, inputs.publishing) / 2,
        "staleness bound": 1 - min(both_wait * (1 - inputs.publishing), 1 / (bound + 2)),
    }
    if bound and both_wait >= _HELD_BACK:
        # Of the bound + 1 steps' groups that there may be, each takes as long as its whole way.
        periods["learner"] = max(periods["learner"], 1 - learner / (2 * (bound + 1)))
        periods["servers"] = max(periods["servers"], 1 - sampling / 2)
        periods["tools"], periods["judge"] = 1 - tools / 2, 1 - judge / 2
    return {part: 1 / max(0.1, took) - 1 for part, took in periods.items()}


class _Speeds(msgspec.Struct, frozen=True):
    """Speeds of a changed run, as multiples of the present ones."""

    learner: float = 1.0
    sampling: float = 1.0
    outside: float = 1.0  # of tools and the judge


def _with_servers(inputs: LimitInputs, servers: int, more: int) -> _Speeds:
    requests = inputs.requests / servers
    sampled = [_sampled(inputs, count, inputs.slots, requests) for count in (servers + more, servers)]
    return _Speeds(sampling=sampled[0] / sampled[1])


def _with_workers(inputs: LimitInputs, servers: int, workers: int, more: int) -> _Speeds:
    factor = (workers + more) / workers
    if more > 0 and 1 - inputs.ticket_wait - inputs.open_wait < _TAKEN and inputs.open_wait < _CROWDED:
        return _Speeds()  # more slots would wait, too
    requests = inputs.requests / servers
    sampled = [_sampled(inputs, servers, slots, requests) for slots in (inputs.slots * factor, inputs.slots)]
    return _Speeds(sampling=sampled[0] / sampled[1], outside=factor)


def _sampled(inputs: LimitInputs, servers: int, slots: float, requests: float) -> float:
    """Return what servers sample a second, in any unit, with `slots` divided among them, each running `requests` at
    most. It grows with the requests of a server to that power which gives `inputs.more` for twice as many."""
    running: float = max(1.0, min(slots / servers, requests))
    power = min(1.0, math.log2(1 + inputs.more))
    sampled: float = servers * running**power
    return sampled


def _gain(inputs: LimitInputs, config: RunConfig, speeds: _Speeds) -> float:
    """Estimate the gain of steps a second, negative for a loss."""
    learner, slots = 1 - inputs.learner_wait, 1 - inputs.ticket_wait
    overlap, neither = max(0.0, learner + slots - 1), max(0.0, 1 - learner - slots)
    outside = min(1.0, inputs.in_tools + inputs.in_judgement)
    busy_factor = (1 - outside) / speeds.sampling + outside / speeds.outside
    learner_then, slots_then = learner / speeds.learner, slots * busy_factor
    # While they take longer, as much of their time as now passes with the learner busy.
    overlap_then = min(overlap * max(1.0, busy_factor), learner_then, slots_then)
    last = max(0.0, neither - inputs.publishing)
    took = learner_then + slots_then - overlap_then + neither - last * (1 - min(1.0, busy_factor))
    bound, _ = _bound(config)
    if bound and min(inputs.learner_wait, inputs.ticket_wait) >= _HELD_BACK:
        took = min(took, busy_factor) if busy_factor < 1 else took
    return 1 / max(0.1, took) - 1


def _wanted(count: int, one_more: float, one_fewer: float) -> int:
    if one_more >= _WORTH_IT / count:
        return count + 1
    return count - 1 if count > 1 and -one_fewer < _NOT_WORTH_IT / count else count


def _bound(config: RunConfig) -> tuple[float, str]:
    """Return by how many versions the learner may be ahead, and the setting that says so."""
    bound, depth = config.queue.max_staleness, config.queue.depth
    if depth != "auto" and depth - 1 < bound:
        return max(0.0, depth - 1), f"queue.depth = {depth:g}"
    return bound, f"queue.max_staleness = {bound}"


class SlotTimes(msgspec.Struct):
    """Sums over workers, seconds: of their slots, idle for tickets, and idle because no more episodes may be open; and
    of open episodes, in all, in tools, and in judgement."""

    slot_s: float = 0.0
    ticket_wait_s: float = 0.0
    open_wait_s: float = 0.0
    episode_s: float = 0.0
    tools_s: float = 0.0
    judgement_s: float = 0.0

    def add(self, other: SlotTimes) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LimitWindow:
    """Keeps what the limit follows from, of the newest steps and of the newest five minutes. Times are in seconds."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, SlotTimes]] = deque()
        self._steps: deque[LearnerReport] = deque(maxlen=_WINDOW_STEPS)
        self._is_first_step = True
        self._publications: deque[tuple[float, float]] = deque()
        self._published_at: float | None = None
        self._published_share = 0.0

    def session_began(self) -> None:
        """Forget the steps before. The first one of a session waits for servers and workers to start."""
        self._steps.clear()
        self._is_first_step = True
        self._published_share = 0.0

    def stepped(self, report: LearnerReport) -> None:
        share = report.metrics.get("weight_sync/generation_share", self._published_share)
        self._published_share = max(0.0, min(1.0, share))  # also of nan
        if not self._is_first_step:
            self._steps.append(report)
        self._is_first_step = False

    def slots(self, times: SlotTimes, now: float) -> None:
        """Note what passed for a worker since its last report."""
        bucket = int(now / _BUCKET_S)
        if not self._buckets or self._buckets[-1][0] != bucket:
            self._buckets.append((bucket, SlotTimes()))
        self._buckets[-1][1].add(times)
        self._forget(now)

    def versions(self, published: int, served: int | None, now: float) -> None:
        """Note the newest version that was published, and the oldest that a server serves."""
        on_its_way = served is not None and served < published
        if on_its_way and self._published_at is None:
            self._published_at = now
        elif not on_its_way and self._published_at is not None:
            self._publications.append((self._published_at, now))
            self._published_at = None
        self._forget(now)

    def inputs(self, slots: int, requests: int, now: float) -> LimitInputs | None:
        """Return what is known; None before a few steps, or before a worker has told of its slots."""
        self._forget(now)
        step_s = sum(report.step_s for report in self._steps)
        # Of workers what passed meanwhile: of a tool that has become slow, steps tell late enough.
        since = now - max(_MIN_WINDOW_S, min(step_s, _WINDOW_S))
        newest = [part for bucket, part in self._buckets if (bucket + 1) * _BUCKET_S > since]
        times = SlotTimes()
        for part in newest or [part for _, part in self._buckets]:
            times.add(part)
        if len(self._steps) < _MIN_STEPS or not step_s or not times.slot_s:
            return None
        window_s = min(step_s, _WINDOW_S)
        began = now - window_s
        publications = [*self._publications, *([(self._published_at, now)] if self._published_at is not None else ())]
        publishing_s = sum(max(0.0, end - max(start, began)) for start, end in publications)
        return LimitInputs(
            learner_wait=min(1.0, sum(report.wait_s for report in self._steps) / step_s),
            ticket_wait=min(1.0, times.ticket_wait_s / times.slot_s),
            open_wait=min(1.0, times.open_wait_s / times.slot_s),
            in_tools=times.tools_s / times.episode_s if times.episode_s else 0.0,
            in_judgement=times.judgement_s / times.episode_s if times.episode_s else 0.0,
            publishing=min(1.0, publishing_s / window_s),
            published=self._published_share,
            slots=slots,
            requests=requests,
        )

    def _forget(self, now: float) -> None:
        while self._buckets and (self._buckets[0][0] + 1) * _BUCKET_S < now - _WINDOW_S:
            self._buckets.popleft()
        while self._publications and self._publications[0][1] < now - _WINDOW_S:
            self._publications.popleft()
