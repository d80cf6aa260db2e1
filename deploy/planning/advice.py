"""Says what limits a run, and which change helps most: it simulates the run again with each change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any

import msgspec

from slipstream.deploy.planning.calibration import sharing_cores
from slipstream.deploy.planning.rates import Rates, server_count
from slipstream.deploy.planning.simulation import Prediction, Simulation
from slipstream.protocol.config import RunConfig
from slipstream.protocol.status import Limit
from slipstream.rollout_queue.observe.limits import LimitInputs, limit_of

OWN = "a server or worker more is taken to have a machine or GPU of its own"
SHARED = "servers that vllm.count starts share this machine's cores; another server or worker has its own machine"

# A gain below this cannot be told from chance.
MIN_GAIN = 0.03


# Settings that a run's speed depends on, besides the number of servers.
_SPEED = (
    "worker.count",
    "worker.episodes",
    "worker.open_episodes",
    "vllm.max_num_seqs",
    "queue.max_staleness",
    "rollout.group_size",
    "learner.groups_per_step",
    "learner.zero_variance",
    "weight_sync.every",
)


class Change(msgspec.Struct, frozen=True):
    """A change and what it brings. `gain`: of steps a second, as a share."""

    text: str
    gain: float
    prediction: Prediction


class Plan(msgspec.Struct, frozen=True):
    """A prediction of a run, the part that limits it, and what changes would bring, the best first.

    Attributes:
        shares_cores: Whether its servers share this machine's cores.
        notes: What it rests on, and what it leaves out.
    """

    servers: int
    shares_cores: bool
    workers: int
    steps: int
    prediction: Prediction
    limit: Limit
    changes: list[Change]
    advice: str
    notes: list[str]


@dataclass(frozen=True)
class _Case:
    text: str
    config: RunConfig
    rates: Rates


def plan(
    config: RunConfig,
    rates: Rates,
    steps: int,
    notes: tuple[str, ...] = (),
    seed: int = 0,
    measured_with: RunConfig | None = None,
    limit: Limit | None = None,
) -> Plan:
    """Simulate a run of `steps` steps as it is, and with each change.

    Args:
        measured_with: Settings of the run that the rates are of, if servers share one machine's cores, as on a CPU.
        limit: What limits it by its own status, for a run that is planned as it goes; None to derive it from the
            simulation by the same rule.
    """
    shares = measured_with is not None and not (measured_with.vllm.servers or config.vllm.servers)
    if measured_with is not None and shares:
        rates = sharing_cores(rates, measured_with, config)

    def simulated(case: _Case) -> Change:
        prediction = Simulation(case.config, case.rates, seed).run(steps)
        return Change(case.text, prediction.steps_per_s / found.steps_per_s - 1, prediction)

    found = Simulation(config, rates, seed).run(steps)
    alone = sharing_cores(rates, config, with_counts(config, servers=1)) if shares else rates
    changes = sorted(map(simulated, _changes(config, rates, alone, shares)), key=lambda change: -change.gain)
    return Plan(
        servers=server_count(config),
        shares_cores=shares,
        workers=config.worker.count,
        steps=steps,
        prediction=found,
        limit=limit or limit_of(limit_inputs(config, rates, found), config),
        changes=changes,
        advice=_advice(changes[0]),
        notes=[*notes, SHARED if shares else OWN],
    )


def with_counts(config: RunConfig, servers: int | None = None, workers: int | None = None) -> RunConfig:
    """Return the settings with other numbers of servers and workers."""
    if servers is not None:
        config = _with(config, "vllm", servers=[], count=servers)
    return config if workers is None else _with(config, "worker", count=workers)


def differences(planned: RunConfig, record: RunConfig) -> Iterator[str]:
    """Yield a note if settings that a run's speed depends on are others than those of the record."""
    pairs = [(name, value(planned), value(record)) for name in _SPEED if (value := attrgetter(name))]
    pairs.insert(0, ("vLLM servers", server_count(planned), server_count(record)))
    if changed := [f"{name} = {new} (record: {old})" for name, new, old in pairs if new != old]:
        yield f"planned with {', '.join(changed)}"


def _advice(best: Change) -> str:
    if best.gain >= MIN_GAIN:
        return f"What helps most: {best.text}, {best.gain:+.0%} steps a second."
    return "None of these changes by itself brings more steps a second."


def limit_inputs(config: RunConfig, rates: Rates, found: Prediction) -> LimitInputs:
    """Return the facts that a queue would know of such a run, once it is under way."""
    tools_s = fmean(times.tools_s for times in rates.episodes)
    judge_s = fmean(times.judge_s for times in rates.episodes)
    running = max(1.0, found.running)
    twice = min(2 * running, config.vllm.max_num_seqs)
    sampling_s = fmean(times.tokens for times in rates.episodes) * rates.curve.token_s(running)
    publications_per_s = found.steps_per_s / config.weight_sync.every
    return LimitInputs(
        learner_wait=found.learner_wait,
        ticket_wait=found.worker_wait,
        open_wait=found.worker_full,
        in_tools=tools_s / (sampling_s + tools_s + judge_s),
        in_judgement=judge_s / (sampling_s + tools_s + judge_s),
        publishing=min(1.0, publications_per_s * fmean(times.total_s for times in rates.publications)),
        slots=config.worker.count * config.worker.episodes,
        requests=server_count(config) * config.vllm.max_num_seqs,
        more=rates.curve.tokens_per_s(twice) / rates.curve.tokens_per_s(running) - 1,
    )


def _changes(config: RunConfig, rates: Rates, alone: Rates, shares: bool) -> Iterator[_Case]:
    """Yield the run with one setting changed.

    Args:
        alone: Rates of servers that each have a machine to themselves.
        shares: Whether servers share this machine's cores.
    """
    bound, every, groups = config.queue.max_staleness, config.weight_sync.every, config.learner.groups_per_step
    servers, size = server_count(config), config.rollout.group_size
    more = with_counts(config, servers=servers + 1)
    if shares:
        yield _Case(f"vllm.count = {servers + 1}, on the same cores", more, sharing_cores(rates, config, more))
        if servers > 1:
            fewer = with_counts(config, servers=servers - 1)
            yield _Case(f"vllm.count = {servers - 1}", fewer, sharing_cores(rates, config, fewer))
            yield _Case("each vLLM server on its own machine", config, alone)
    yield _Case("one more vLLM server", more, rates)
    slots = -(-config.worker.episodes * (servers + 1) // servers)
    filled = _with(more, "worker", episodes=slots)
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
