"""The one JSON object of `GET /v1/status`: who waits for whom and since when (I7).

An evaluation: what the learner asks the queue for, and what came of it.

Evaluations run beside the training, on the same workers and servers; their groups are not trained on.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from protocol.messages import Natural, Seconds, Server

# What ended an evaluation: all of its rows came to an end; its time-out; the end of the run.
Ended = Literal["complete", "deadline", "run_over"]


class EvaluationRequest(msgspec.Struct):
    """Ask for an evaluation that belongs to `step`; asking again for the same changes nothing.

    version: no server samples for it before it serves this one or a newer; rows: the first so many of the data set,
    None for all; temperature: None for the run's; timeout_s: seconds from now until it is ended as it is.
    """

    session: int
    step: Natural
    version: Natural
    rows: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None
    group_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None
    timeout_s: Seconds


class Evaluation(msgspec.Struct):
    """An evaluation of `step`, so far or at its end; figures are over the rows that are done, None while none is.

    rows: None until a worker has said how many there are; done, failed: of them; failures: those that failed, by
    reason; ended: None while it is open; waits_for: what keeps it from going on, None if nothing does; seconds: since
    it was asked for, at its end how long it took. rollouts: episodes that have a reward.

    reward: mean over the rows of each row's mean; reward_std: standard deviation of the rows' means, of the sample;
    rewards: of each reward function, as `reward` is; best: mean over the rows of each row's best rollout, None where
    group_size is 1; passes: whether every reward so far is 0 or 1, so that `best` is a share of rows; mean_length:
    sampled tokens of a rollout; clipped: share of rollouts that ended as `length` or `context`; finished: rollouts by
    what ended them; versions: lowest and highest policy version that sampled any of it.
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
    passes: bool = False
    mean_length: float | None = None
    clipped: float | None = None
    finished: dict[str, int] = {}
    versions: tuple[int, int] | None = None

    @property
    def best_name(self) -> str:
        """What the field calls `best`: pass@k where a rollout passes or fails, else best@k."""
        return f"{'pass' if self.passes else 'best'}@{self.group_size}"


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Those that are known, for `metrics.jsonl` and trackers, under TRL's names where the meaning is the same."""
    found: dict[str, float | None] = {
        "eval/step": evaluation.step,
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
    """Groups by place, and what bounds them. outstanding = tickets + ready + leased; `limit`: how many admission allows
    outstanding now. `bytes`: of ready and leased groups; `kept_bytes`: those of trained groups that a resume may bring
    back are among them."""

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
    """Versions, over the groups of the newest steps. `in_flight` passed between sampling of the oldest token
    and arrival, `in_queue` between arrival and training; `max_ever` covers the whole run."""

    mean: float = 0.0
    max: int = 0
    max_ever: int = 0
    in_flight_mean: float = 0.0
    in_queue_mean: float = 0.0


class Rates(msgspec.Struct):
    """Per second, over the last minute."""

    groups: float = 0.0
    tokens_sampled: float = 0.0
    tokens_trained: float = 0.0
    steps: float = 0.0


class LearnerStatus(msgspec.Struct):
    """`wait_share`: part of its time that the learner waited for groups, over its newest steps; `metrics`: the main
    ones of its newest step, by their names in `metrics.jsonl`."""

    session: int = 0
    step: int = 0
    version: int = 0
    reward_mean: float | None = None
    step_s: float | None = None
    wait_share: float | None = None
    seen_s_ago: float | None = None
    metrics: dict[str, float] = {}


class WorkerStatus(msgspec.Struct):
    """`wait_share`: part of its slots that was idle because there were no tickets, since its start; `full_share`:
    because no more episodes were to be open. The episodes' fields are those of `WorkerReport`; `hung_calls`: calls of
    user code that were given up and have not come back; `waiting_for_servers`: episodes that wait for a vLLM server
    that may be asked; `cpu_ms_per_episode`: of all episodes, those of evaluations too."""

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


class ServerStatus(Server):
    """A server and how it stands: `lag`, versions that it is behind the learner, None before its first proof;
    `since_s`: seconds in this state; `waits_for`: whom or what it waits for, None while it serves."""

    lag: int | None = None
    since_s: float = 0.0
    waits_for: str | None = None


class Wait(msgspec.Struct):
    """`who` waits for `what` since `since_s` seconds."""

    who: str
    what: str
    since_s: float


class Stall(msgspec.Struct):
    """`stalled`: no optimiser step came for `after_s`, the longer of `queue.stall_after_s` and 5 median steps;
    before the first, ten times `queue.stall_after_s` while the learner holds a step's groups. `since_s`: seconds since
    the newest, or since everything was there to make one, 0 while things start or load; `why`: the likeliest cause."""

    stalled: bool
    since_s: float
    why: str | None = None
    after_s: float = 0.0


class Notice(msgspec.Struct):
    """What a person should be told once: the first failure of its kind, groups without variance, a changed task file.
    `id` grows by one from notice to notice, while the queue lives; `who`: the worker that met it, if one did."""

    id: int
    kind: str
    text: str
    who: str | None
    since_s: float


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
    """`depth`: groups outstanding, in optimiser steps; `depth_target`: what admission aims at, d of DESIGN.md;
    `gave_up`: why the run can go no further, if the queue found so; `evaluations`: those that are open and the newest
    of the others, in the order in which they were asked for."""

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
    evaluations: list[Evaluation] = []


def episodes_at(status: Status) -> dict[str, int]:
    """Open episodes of all workers by what they do now; `over` are those that wait for the rest of their group, and
    the few between two of the others."""
    at = {
        place: sum(getattr(worker, f"episodes_{place}") for worker in status.workers)
        for place in ("generating", "waiting", "in_tools", "in_judgement")
    }
    return {**at, "over": max(0, sum(worker.episodes_in_flight for worker in status.workers) - sum(at.values()))}


def describe_evaluation(evaluation: Evaluation) -> str:
    """Describes an evaluation in one line."""
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
