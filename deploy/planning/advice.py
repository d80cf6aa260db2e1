"""Says what limits a run, and which change helps most: it simulates the run again with each change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from deploy.planning.rates import EpisodeTimes, Rates, server_count
from deploy.planning.simulation import Prediction, Simulation
from protocol.config import RunConfig

# A gain below this cannot be told from chance.
MIN_GAIN = 0.03


class Change(msgspec.Struct, frozen=True):
    """A change and what it brings. `gain`: of steps a second, as a share."""

    text: str
    gain: float
    prediction: Prediction


class Plan(msgspec.Struct, frozen=True):
    """What a run will do, what limits it, and what changes would bring, the best first.

    Attributes:
        limit: What twice the speed of helps most; None if nothing does.
        notes: What it rests on, and what it leaves out.
    """

    servers: int
    workers: int
    steps: int
    prediction: Prediction
    limit: str | None
    changes: list[Change]
    advice: str
    notes: list[str]


@dataclass(frozen=True)
class _Case:
    text: str
    config: RunConfig
    rates: Rates


def plan(config: RunConfig, rates: Rates, steps: int, notes: tuple[str, ...] = (), seed: int = 0) -> Plan:
    """Simulate a run of `steps` steps as it is, and with each change."""

    def simulated(case: _Case) -> Change:
        prediction = Simulation(case.config, case.rates, seed).run(steps)
        return Change(case.text, prediction.steps_per_s / found.steps_per_s - 1, prediction)

    found = Simulation(config, rates, seed).run(steps)
    limits = sorted(map(simulated, _faster(config, rates)), key=lambda change: -change.gain)
    changes = sorted(map(simulated, _changes(config, rates)), key=lambda change: -change.gain)
    limit = limits[0].text if limits[0].gain >= MIN_GAIN else None
    return Plan(
        servers=server_count(config),
        workers=config.worker.count,
        steps=steps,
        prediction=found,
        limit=limit,
        changes=changes,
        advice=_advice(limit, changes),
        notes=[*notes, "a server or worker more is taken to have a machine or GPU of its own"],
    )


def with_counts(config: RunConfig, servers: int | None = None, workers: int | None = None) -> RunConfig:
    """Return the settings with other numbers of servers and workers."""
    if servers is not None:
        config = _with(config, "vllm", servers=[], count=servers)
    return config if workers is None else _with(config, "worker", count=workers)


def _advice(limit: str | None, changes: list[Change]) -> str:
    best = changes[0]
    if best.gain >= MIN_GAIN:
        return f"What helps most: {best.text}, {best.gain:+.0%} steps a second."
    if limit is None:
        return "No change by itself brings more steps a second."
    return f"None of these changes brings more steps a second: only faster work of {limit} would."


def _faster(config: RunConfig, rates: Rates) -> Iterator[_Case]:
    """Yield the run with one part of it at twice its speed."""
    yield _Case("the vLLM servers", config, replace(rates, curve=rates.curve.scaled(0.5)))
    learner = replace(rates, step_s=rates.step_s / 2, trained_token_s=rates.trained_token_s / 2)
    yield _Case("the learner", config, learner)
    yield _Case("the workers' slots", _with(config, "worker", episodes=2 * config.worker.episodes), rates)
    if any(times.tools_s or times.judge_s for times in rates.episodes):
        faster = tuple(_waiting_half(times) for times in rates.episodes)
        yield _Case("tools and judges", config, replace(rates, episodes=faster))
    brief = tuple(
        replace(times, transfer_s=times.transfer_s / 2, total_s=times.total_s / 2, pause_s=times.pause_s / 2)
        for times in rates.publications
    )
    yield _Case("publication", config, replace(rates, publications=brief))


def _waiting_half(times: EpisodeTimes) -> EpisodeTimes:
    return replace(times, tools_s=times.tools_s / 2, judge_s=times.judge_s / 2)


def _changes(config: RunConfig, rates: Rates) -> Iterator[_Case]:
    """Yield the run with one setting changed."""
    bound, every, groups = config.queue.max_staleness, config.weight_sync.every, config.learner.groups_per_step
    servers, size = server_count(config), config.rollout.group_size
    yield _Case("one more vLLM server", with_counts(config, servers=servers + 1), rates)
    slots = -(-config.worker.episodes * (servers + 1) // servers)
    filled = _with(with_counts(config, servers=servers + 1), "worker", episodes=slots)
    yield _Case(f"one more vLLM server and worker.episodes = {slots}", filled, rates)
    yield _Case("one more worker", with_counts(config, workers=config.worker.count + 1), rates)
    for other in (bound - 1, bound + 1):
        if other >= max(0, every - 1):
            yield _Case(f"queue.max_staleness = {other}", _with(config, "queue", max_staleness=other), rates)
    episodes, most = 2 * config.worker.episodes, 2 * config.vllm.max_num_seqs
    yield _Case(f"worker.episodes = {episodes}", _with(config, "worker", episodes=episodes), rates)
    both = _with(_with(config, "worker", episodes=episodes), "vllm", max_num_seqs=most)
    yield _Case(f"vllm.max_num_seqs = {most} and worker.episodes = {episodes}", both, rates)
    if groups > 1 and not groups % 2:
        larger = _with(_with(config, "rollout", group_size=2 * size), "learner", groups_per_step=groups // 2)
        yield _Case(f"rollout.group_size = {2 * size} and learner.groups_per_step = {groups // 2}", larger, rates)
    if bound > every:
        yield _Case(f"weight_sync.every = {every + 1}", _with(config, "weight_sync", every=every + 1), rates)


def _with(config: RunConfig, section: str, **settings: Any) -> RunConfig:
    changed = getattr(config, section).model_copy(update=settings)
    return config.model_copy(update={section: changed})
