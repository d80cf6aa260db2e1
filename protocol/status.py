"""The JSON object of `GET /v1/status`, with every wait and its seconds (I7); and evaluations, a part of it.

Evaluations run during training on the same workers and servers. Their groups are not trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, get_args

import msgspec

from slipstream.protocol.messages import Natural, RankReport, Seconds, Server

# Ends of an evaluation: all of its rows ended; its time-out; the end of the run.
Ended = Literal["complete", "deadline", "run_over"]

# Names of evaluations' metrics begin with `EVAL`. `EVAL_STEP` is the step that an evaluation evaluates.
EVAL, EVAL_STEP = "eval/", "eval/step"


class EvaluationRequest(msgspec.Struct):
    """Asks for an evaluation of `step`. Asking again for the same step changes nothing.

    Attributes:
        version: Oldest version that may sample for it.
        rows: First rows of the data set; None for all.
        temperature: None for the run's.
        timeout_s: Time after which it ends as it is, seconds.
    """

    session: int
    step: Natural
    version: Natural
    rows: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None
    group_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None
    timeout_s: Seconds


class Evaluation(msgspec.Struct):
    """An evaluation of `step`, so far or at its end. Metrics are over the rows that are done, None while none is.

    Attributes:
        rows: None until a worker has said how many there are. `done`, `failed`: how many of them have ended so.
        failures: Failed rows by reason.
        ended: None while it is open.
        waits_for: Obstacle that keeps it from continuing; None if there is none.
        seconds: Time since it was asked for; once it has ended, how long it took.
        rollouts: Episodes that have a reward.
        reward: Mean over rows of each row's mean reward. `reward_std`: sample standard deviation of the rows' means.
        rewards: The same mean for each reward function.
        best: Mean over rows of each row's best reward, of several roles of the mean of theirs; None if group_size is 1.
        mean_length: Sampled tokens of a rollout.
        clipped: Share of rollouts that ended as `length` or `context`.
        finished: Rollouts by finish reason.
        versions: Lowest and highest policy version that sampled any of it.
    """

    step: int
    version: int
    group_size: int
    temperature: float | None = None
    rows: int | None = None
    done: int = 0
    failed: int = 0
    failures: dict[str, int] = {}
    ended: Ended | None = None
    waits_for: str | None = None
    seconds: float = 0.0
    rollouts: int = 0
    reward: float | None = None
    reward_std: float | None = None
    rewards: dict[str, float] = {}
    best: float | None = None
    mean_length: float | None = None
    clipped: float | None = None
    finished: dict[str, int] = {}
    versions: tuple[int, int] | None = None

    @property
    def best_name(self) -> str:
        """The name of `best` in metrics: best@k, which is pass@k where each reward is 0 or 1."""
        return f"best@{self.group_size}"


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the known metrics for `metrics.jsonl` and trackers, under TRL's names where they mean the same."""
    found: dict[str, float | None] = {
        EVAL_STEP: evaluation.step,
        "eval/reward": evaluation.reward,
        "eval/reward_std": evaluation.reward_std,
        **{f"eval/rewards/{name}/mean": value for name, value in evaluation.rewards.items()},
        f"eval/{evaluation.best_name}": evaluation.best,
        "eval/completions/mean_length": evaluation.mean_length,
        "eval/completions/clipped_ratio": evaluation.clipped,
        "eval/runtime": evaluation.seconds,
        "eval/rows": evaluation.rows,
        "eval/failed": evaluation.failed,
        "eval/version_min": None if evaluation.versions is None else evaluation.versions[0],
        "eval/version_max": None if evaluation.versions is None else evaluation.versions[1],
    }
    return {name: value for name, value in found.items() if value is not None}


class GroupCounts(msgspec.Struct):
    """Counts of groups, and their limits.

    Attributes:
        outstanding: tickets + ready + leased. `limit`: how many admission allows now.
        bytes: Bytes of ready and leased groups.
        kept_bytes: `bytes` and those of trained groups that a resume may bring back.
    """

    tickets: int
    ready: int
    leased: int
    outstanding: int
    bytes: int
    capacity_groups: int
    capacity_bytes: int
    limit: int
    kept_bytes: int = 0


class Staleness(msgspec.Struct):
    """Staleness of the groups of the newest steps, in versions.

    `in_flight` passed from the sampling of a group's oldest token to its arrival, `in_queue` from there to its
    training. `max_ever` covers the whole run.
    """

    mean: float = 0.0
    max: int = 0
    max_ever: int = 0
    in_flight_mean: float = 0.0
    in_queue_mean: float = 0.0


class Rates(msgspec.Struct):
    """Events per second over the last minute. `tokens_dropped`: sampled tokens of dropped groups."""

    groups: float = 0.0
    tokens_sampled: float = 0.0
    tokens_trained: float = 0.0
    steps: float = 0.0
    tokens_dropped: float = 0.0


class RowsStatus(msgspec.Struct, frozen=True):
    """How the rows of the data set went, with `task.order = "learnable"`.

    Attributes:
        rows: All of them. `tried`: those with a group. `teaching`: those whose newest groups had rewards that differ.
        lowest, highest: Lowest and highest mean reward of a row that was tried.
        histogram: Rows that were tried, by their mean reward, in equal parts from `lowest` to `highest`.
    """

    rows: int
    tried: int = 0
    teaching: int = 0
    lowest: float = 0.0
    highest: float = 0.0
    histogram: list[int] = []


class ConnectionStatus(msgspec.Struct):
    """Connections to the queue.

    Attributes:
        open: Open connections by kind: `worker`, `control` (learner, servers, people, metrics), `health`, `new` ones
            that made no request yet, and `closing` ones. `limits`: how many there may be.
        max_workers: How many workers the queue takes.
        refused: Requests of workers that were refused for lack of room (BUSY), the first `refused_since_s` seconds ago
            and the newest `refused_s_ago`. Counted again after an hour without one; `refused_ever`: since the start.
    """

    open: dict[str, int] = {}
    limits: dict[str, int] = {}
    max_workers: int = 0
    refused: int = 0
    refused_since_s: float | None = None
    refused_s_ago: float | None = None
    refused_ever: int = 0


class LearnerStatus(msgspec.Struct):
    """The learner in the status. `wait_share`: share of the newest steps' time that it waited for groups.

    `metrics`: the main ones of its newest step, by their names in `metrics.jsonl`. `changed`: settings that are others
    than before the resume with which its session began. `ranks`: each of its ranks in its newest step; empty if there
    is one.
    """

    session: int = 0
    step: int = 0
    version: int = 0
    reward_mean: float | None = None
    step_s: float | None = None
    wait_share: float | None = None
    seen_s_ago: float | None = None
    metrics: dict[str, float] = {}
    changed: list[str] = []
    ranks: list[RankReport] = []


# Where an open episode of a worker may be, besides over and waiting for its group.
EpisodePlace = Literal["generating", "waiting", "in_tools", "in_judgement"]

EPISODE_PLACES: tuple[EpisodePlace, ...] = get_args(EpisodePlace)

WorkerActivity = Literal[
    "generating",
    "waiting",
    "in_tools",
    "in_judgement",
    "waiting_for_servers",
    "waiting_for_tickets",
    "waiting_for_session",
    "idle",
    "quiet",
    "silent",
    "refused",
    "left",
]


class WorkerStatus(msgspec.Struct):
    """A worker in the status. Other fields are those of `WorkerReport`.

    Attributes:
        does: Where most of its open episodes are; without any, what it waits for; `silent` for a minute, `refused`,
            or `left`.
        wait_share: Share of its slots' time, since its start, that was idle because there were no tickets.
        full_share: The same, because no more episodes were allowed to be open.
        cpu_ms_per_episode: Over all episodes, those of evaluations too.
        reason: Why it is refused; None if it is not.
    """

    worker_id: str
    host: str
    pid: int
    capacity: int
    episodes_in_flight: int
    episodes_done: int
    episodes_failed: int
    tokens_sampled: int
    tool_calls: int
    tool_failures: int
    requests_retried: int
    wait_share: float
    cpu_ms_per_episode: float | None
    seen_s_ago: float
    failures: dict[str, int] = {}
    hung_calls: int = 0
    waiting_for_servers: int = 0
    max_open: int = 0
    episodes_generating: int = 0
    episodes_waiting: int = 0
    episodes_in_tools: int = 0
    episodes_in_judgement: int = 0
    full_share: float = 0.0
    eval_episodes: int = 0
    does: WorkerActivity = "idle"
    reason: str | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nothing is expected of it any more."""
        return self.does in ("silent", "refused", "left")


class ServerStatus(Server):
    """A server in the status.

    Attributes:
        lag: Versions that it is behind the learner; None before its first proof.
        since_s: Time in its state, seconds.
        waits_for: What it waits for; None while it serves.
    """

    lag: int | None = None
    since_s: float = 0.0
    waits_for: str | None = None


class Wait(msgspec.Struct):
    """`who` has waited for `what` for `since_s` seconds.

    `count`: how many `who` stands for. Many that wait for the same are one `Wait`, which says how long the first has.
    """

    who: str
    what: str
    since_s: float
    count: int = 1

    @property
    def verb(self) -> str:
        """`wait` where `who` are several, else `waits`."""
        several = self.count > 1 or self.who.endswith("'s episodes") or self.who.startswith("groups ")
        return "wait" if several else "waits"


class Stall(msgspec.Struct):
    """The stall alarm.

    Attributes:
        stalled: Whether no optimiser step came for `after_s`.
        since_s: Seconds since the newest step, or since there was everything to make one; 0 while things start or load.
        why: The likeliest cause.
        after_s: The longer of `queue.stall_after_s` and 5 median steps; before the first step, ten times
            `queue.stall_after_s` while the learner holds a step's groups.
    """

    stalled: bool
    since_s: float
    why: str | None = None
    after_s: float = 0.0


# What a cause costs: `bad`, nothing is learnt while it lasts; `warn`, part of the work is lost.
Severity = Literal["bad", "warn"]


# Begins `Cause.about` where groups fail.
FAILING = "groups that fail"


class Cause(msgspec.Struct, frozen=True):
    """A cause that keeps a run from learning, as long as it does so, and its remedy.

    Attributes:
        about: What it is about, such as `tool search` or `rewards`. Of several causes each is about something else.
        since_s: Seconds for which it has been seen. One that is over stays for a while, lest it come and go.
        times: How often it was over and came back, and once more. `first_s`: seconds since the first time.
    """

    about: str
    text: str
    severity: Severity
    since_s: float = 0.0
    times: int = 1
    first_s: float = 0.0


LimitingPart = Literal["learner", "servers", "workers' slots", "tools", "judge", "staleness bound", "publication"]


class Limit(msgspec.Struct, frozen=True):
    """The limit of a run's speed. `part`: None if none does by itself; `text`: a sentence with the figures."""

    part: LimitingPart | None
    text: str


class Scaling(msgspec.Struct, frozen=True):
    """What one more of each would bring, and how many a scaler should keep.

    Attributes:
        one_more: Gain of steps a second, as a share, from one more `server`, `worker` or learner `rank`.
        servers_wanted, workers_wanted: Numbers that a scaler should keep: one more than there are where that brings at
            least half of its share of the speed, one fewer where that costs less than a quarter of it.
    """

    one_more: dict[str, float]
    servers_wanted: int
    workers_wanted: int


class Notice(msgspec.Struct):
    """A text that tells a person what to fix, given once.

    `id` grows by one with each notice while the queue runs. `who`: the worker or process that it is about, if any;
    `count`: how many said the same; `times`: how often it came back, and once more, the first time `first_s` seconds
    ago.
    """

    id: int
    kind: str
    text: str
    who: str | None
    since_s: float
    count: int = 1
    times: int = 1
    first_s: float = 0.0


class TicketCounts(msgspec.Struct):
    """Every ticket of the run: issued = trained + dropped + reissued + outstanding (I1).

    `reissued` tickets ended because their row was issued again under a new id: they expired, were given back, or
    were trained on a time line that a resume left behind.
    """

    issued: int = 0
    trained: int = 0
    dropped: int = 0
    reissued: int = 0
    outstanding: int = 0


class Status(msgspec.Struct):
    """State of the run.

    Attributes:
        depth: Groups outstanding, in optimiser steps. `depth_target`: what admission aims at.
        drops: Dropped tickets by reason. `rejections`: refused groups by reason.
        tokens_dropped: Part of `tokens_sampled` that taught nothing, since its groups were dropped, by reason.
        rows: How the rows went; None unless `task.order = "learnable"`.
        gave_up: Why the run was given up; None if it was not.
        diagnosis: What keeps the run from learning, the likeliest cause first; empty if all is well.
        limit: What limits the run's speed; None before a few steps, and once it has finished.
        evaluations: Open ones and the newest of the others, in the order of their requests.
    """

    run: str
    uptime_s: float
    version: int
    served_version: int | None
    step: int
    total_steps: int
    checkpoint_step: int | None
    finished: bool
    max_staleness: int
    depth: float
    depth_target: float
    groups: GroupCounts
    staleness: Staleness
    rates: Rates
    learner: LearnerStatus
    workers: list[WorkerStatus]
    servers: list[ServerStatus]
    waits: list[Wait]
    stall: Stall
    ledger: TicketCounts
    tokens_sampled: int = 0
    learner_wait_share: float | None = None
    worker_wait_share: float | None = None
    worker_cpu_ms_per_episode: float | None = None
    drops: dict[str, int] = {}
    rejections: dict[str, int] = {}
    notices: list[Notice] = []
    gave_up: str | None = None
    diagnosis: list[Cause] = []
    limit: Limit | None = None
    scaling: Scaling | None = None
    evaluations: list[Evaluation] = []
    connections: ConnectionStatus = msgspec.field(default_factory=ConnectionStatus)
    tokens_dropped: dict[str, int] = {}
    rows: RowsStatus | None = None

    @property
    def taught_nothing(self) -> float | None:
        """Share of the sampled tokens whose groups were dropped; None before the first token."""
        return sum(self.tokens_dropped.values()) / self.tokens_sampled if self.tokens_sampled else None

    @property
    def taught_nothing_of_late(self) -> float | None:
        """The same of the tokens that were trained or dropped in the last minute; None if there were none."""
        ended = self.rates.tokens_dropped + self.rates.tokens_trained
        return self.rates.tokens_dropped / ended if ended else None


def recurrence(of: Cause | Notice) -> str:
    """Say how often a cause or notice was seen, to follow its text; "" where it was once."""
    return f" (seen {of.times} times in {max(1, round(of.first_s / 60))} min)" if of.times > 1 else ""


def episodes_at(workers: Iterable[WorkerStatus]) -> dict[str, int]:
    """Count the open episodes of workers by what they do; `over` wait for the rest of their group, or are between two
    of the others."""
    at: dict[str, int] = dict.fromkeys(EPISODE_PLACES, 0)
    open_episodes = 0
    for worker in workers:
        open_episodes += worker.episodes_in_flight
        if worker.episodes_in_flight:
            for place in EPISODE_PLACES:
                at[place] += getattr(worker, f"episodes_{place}")
    return {**at, "over": max(0, open_episodes - sum(at.values()))}


def describe_evaluation(evaluation: Evaluation) -> str:
    """Describe an evaluation in one line."""
    rows = evaluation.rows
    if rows is None:
        return f"evaluation of step {evaluation.step}: it ended ({evaluation.ended}) before any row was handed out"
    parts = [f"{evaluation.done} of {rows} rows" if evaluation.failed else f"{rows} rows"]
    if evaluation.group_size > 1:
        parts[0] += f" x {evaluation.group_size}"
    if evaluation.best is not None:
        parts.append(f"{evaluation.best_name} {evaluation.best:.3f}")
    if evaluation.mean_length is not None:
        parts.append(f"{evaluation.mean_length:.0f} tokens")
    if evaluation.clipped:
        parts.append(f"{evaluation.clipped:.0%} cut off")
    if evaluation.versions is not None:
        oldest, newest = evaluation.versions
        parts.append(f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
    parts.append(f"{evaluation.seconds:.1f} s")
    reward = "no reward" if evaluation.reward is None else f"reward {evaluation.reward:.3f}"
    text = f"evaluation of step {evaluation.step}: {reward} ({', '.join(parts)})"
    if evaluation.failed:
        counts = sorted(evaluation.failures.items())
        why = ", ".join(f"{reason.removeprefix('failed:')} {count}" for reason, count in counts)
        text += f"; failed: {why}"
    return text
