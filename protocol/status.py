"""The one JSON object of `GET /v1/status`: who waits for whom and since when (I7)."""

from __future__ import annotations

import msgspec

from protocol.evaluations import Evaluation
from protocol.messages import Server


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
    most_open: int = 0
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
