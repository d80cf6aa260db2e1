"""The rates that a simulation runs on, and how they are read from what a run left behind.

Of `metrics.jsonl` it takes steps, lengths and times, of `rollouts.jsonl` single episodes, of `publications.jsonl` how
long a version takes, of `history/` how many episodes generated at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.deploy.planning import probe
from slipstream.deploy.planning.serving import Curve
from slipstream.protocol import history
from slipstream.protocol.codec import read_json_lines
from slipstream.protocol.config import ConfigError, RunConfig, load
from slipstream.protocol.rollouts import FILE_NAME as ROLLOUTS
from slipstream.protocol.status import Limit, Status

METRICS, PUBLICATIONS, RUN_FILE = "metrics.jsonl", "publications.jsonl", "run.toml"

# Parts of a run: a policy that learns answers more and more prompts always or never.
_PARTS = 10

# Steps of half a run that tell its speed, and how many times as fast one half is if the run changed.
_HALF, _CHANGED = 8, 1.5

# The newest steps and rollouts of a run that count.
MAX_STEPS = 500
MAX_ROLLOUTS = 5000

Line = dict[str, Any]


@dataclass(frozen=True)
class EpisodeTimes:
    """One episode. `turns`: of the policy; `tokens`: sampled ones; seconds in all its tool calls and in its judge."""

    turns: int
    tokens: float
    tools_s: float = 0.0
    judge_s: float = 0.0


@dataclass(frozen=True)
class PublicationTimes:
    """One publication: seconds until the server swaps its weights, of the swap's pause, and until it is proven."""

    transfer_s: float
    pause_s: float
    total_s: float

    def scaled(self, factor: float) -> PublicationTimes:
        return PublicationTimes(self.transfer_s * factor, self.pause_s * factor, self.total_s * factor)


@dataclass(frozen=True)
class Rates:
    """Rates that a run measured.

    Attributes:
        episodes, publications: Samples, of which the simulation draws.
        curve: Speed of one server.
        running: Mean number of requests that a server ran while these were measured.
        idle_publication: Time of a publication into an idle server, as a share of that of `publications`.
        prompt_tokens: Mean of a group's prompt.
        zero_variance: Share of groups whose rewards are all equal, from the first steps to the last.
        step_s, trained_token_s: Seconds of an optimiser step, and of each token in it that trains.
    """

    episodes: tuple[EpisodeTimes, ...]
    curve: Curve
    publications: tuple[PublicationTimes, ...]
    zero_variance: tuple[float, ...]
    step_s: float
    trained_token_s: float
    running: float = 1.0
    idle_publication: float = 1.0
    prompt_tokens: float = 0.0

    @property
    def shape(self) -> probe.Shape:
        """How its episodes look to a server, on average."""
        turns, tokens = sum(times.turns for times in self.episodes), sum(times.tokens for times in self.episodes)
        mean_turns = turns / len(self.episodes)
        return probe.Shape(max(1, round(self.prompt_tokens)), max(1, round(tokens / turns)), mean_turns)


class Measured(msgspec.Struct, frozen=True):
    """Results of a run, under the names of `Prediction`; None where the run kept no record of it."""

    steps: int
    steps_per_s: float
    tokens_per_s: float
    trained_tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    learner_wait: float
    worker_wait: float | None


@dataclass(frozen=True)
class Record:
    """A run that was measured: its settings, rates and results, in words what the rates rest on, and what limited it in
    the end, as its own queue said; None if it said nothing yet."""

    config: RunConfig
    rates: Rates
    measured: Measured
    notes: tuple[str, ...]
    limit: Limit | None = None


def read_record(run_dir: Path) -> Record:
    """Read the rates of a run.

    Raises:
        ConfigError: There is no such run, it made fewer than two steps (the first one waits for the start), or its
            files hold what no run writes.
    """
    if not run_dir.is_dir():
        raise ConfigError(
            f"{run_dir}: there is no such directory; plan reads what a run has measured, after two of its "
            f"steps or more: start this one, or name another by --from RUN_DIR"
        )
    try:
        return _read_record(run_dir)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{run_dir}: {METRICS}, {ROLLOUTS}, {PUBLICATIONS} or {history.FOLDER} hold what no run writes "
            f"({type(error).__name__}: {error}): name another run with --from RUN_DIR"
        ) from error


def _read_record(run_dir: Path) -> Record:
    lines = list(read_json_lines(run_dir / METRICS, Line))
    steps = [line for line in lines if _is_step(line)][1:][-MAX_STEPS:]
    if not steps:
        raise ConfigError(
            f"{run_dir}: has no run of two steps or more to learn from ({len(lines)} in {METRICS}): make a run of a "
            f"few steps first, with `slipstream up`, or name another one with --from RUN_DIR"
        )
    config = load(str(run_dir / RUN_FILE), [])
    statuses = [entry.status for entry in history.read(run_dir / history.FOLDER) if entry.status is not None]
    statuses = [status for status in statuses if status.step and not status.finished]
    notes: list[str] = []
    _note_change(steps, notes)
    running = _running(config, steps, statuses)
    publications, idle_publication = _publications(run_dir, notes)
    rates = Rates(
        episodes=_episodes(run_dir, steps, notes),
        curve=probe.read(run_dir) or _curve(config, steps, running, notes),
        publications=publications,
        zero_variance=_zero_variance(steps),
        **_step_times(steps),
        running=min(running, float(config.vllm.max_num_seqs)),
        idle_publication=idle_publication,
        prompt_tokens=_sum(steps, "tokens_prompt") / max(1.0, _sum(steps, "rollouts")),
    )
    limit = statuses[-1].limit if statuses else None
    return Record(config, rates, _measured(steps, statuses), tuple(notes), limit)


def _note_change(steps: Sequence[Line], notes: list[str]) -> None:
    """Note that a run went at two speeds, since its rates are means of both."""
    half = len(steps) // 2
    if half < _HALF:
        return
    before, after = (_sum(part, "tokens_sampled") / _sum(part, "step_time") for part in (steps[:half], steps[half:]))
    if max(before, after) > _CHANGED * min(before, after):
        notes.append(
            f"it sampled {before:,.0f} tokens/s in the first half of its steps and {after:,.0f} in the second; this "
            f"plan rests on both: if a setting, tool or machine changed between, plan from a run of a few steps as it "
            f"is now"
        )


def _is_step(line: Line) -> bool:
    return (line.get("step_time") or 0) > 0 and (line.get("tokens_sampled") or 0) > 0


def server_count(config: RunConfig) -> int:
    return max(1, len(config.vllm.servers) or config.vllm.count)


def _measured(steps: Sequence[Line], statuses: Sequence[Status]) -> Measured:
    seconds, trained = _sum(steps, "step_time"), _sum(steps, "tokens_trained")
    stale = sum(line.get("staleness_mean", 0.0) * line.get("tokens_trained", 0) for line in steps)
    return Measured(
        steps=len(steps),
        steps_per_s=len(steps) / seconds,
        tokens_per_s=_sum(steps, "tokens_sampled") / seconds,
        trained_tokens_per_s=trained / seconds,
        staleness_mean=stale / trained if trained else 0.0,
        staleness_max=max(int(line.get("staleness_max", 0)) for line in steps),
        learner_wait=_sum(steps, "wait_s") / seconds,
        worker_wait=statuses[-1].worker_wait_share if statuses else None,
    )


def _episodes(run_dir: Path, steps: Sequence[Line], notes: list[str]) -> tuple[EpisodeTimes, ...]:
    """Return the rollouts that the run kept, made as long as all of its rollouts were on average."""
    tokens, turns = _mean(steps, "completions/mean_length") or 1.0, _mean(steps, "rollout/turns_mean") or 1.0
    tools_s, judge_s = _mean(steps, "rollout/tools_s"), _mean(steps, "rollout/reward_s")
    if tools_s is None:
        notes.append("it recorded no times of tools and rewards, as runs of earlier releases: they count as 0 s")
    views = [view for view in _views(run_dir / ROLLOUTS) if view.turns and view.sampled_tokens][-MAX_ROLLOUTS:]
    if not views:
        return (EpisodeTimes(max(1, round(turns)), tokens, tools_s or 0.0, judge_s or 0.0),)
    longer = tokens / float(np.mean([view.sampled_tokens for view in views]))
    return tuple(
        EpisodeTimes(
            view.turns,
            view.sampled_tokens * longer,
            view.timings.get("tools", tools_s or 0.0),
            view.timings.get("reward", judge_s or 0.0),
        )
        for view in views
    )


def _curve(config: RunConfig, steps: Sequence[Line], mean: float, notes: list[str]) -> Curve:
    """Assume how a server's seconds a token depend on its requests, of which a run shows one number, `mean`."""
    tokens_per_s = _sum(steps, "tokens_sampled") / _sum(steps, "step_time") / server_count(config)
    notes.append(
        f"its servers ran about {mean:.0f} requests each all the time, so how their speed depends on that number is "
        f"assumed: half of a token's {mean / tokens_per_s * 1e3:.1f} ms grows with it; --probe measures it"
    )
    return Curve.line(mean / tokens_per_s / 2, 0.5 / tokens_per_s)


def _running(config: RunConfig, steps: Sequence[Line], statuses: Sequence[Status]) -> float:
    """Return how many requests a server had on average: by Little's law, tokens a second times seconds a token."""
    servers = server_count(config)
    token_s = [
        line["rollout/generate_s"] / line["completions/mean_length"] * line["tokens_sampled"] / line["step_time"]
        for line in steps
        if line.get("rollout/generate_s") and line.get("completions/mean_length")
    ]
    generating = [sum(worker.episodes_generating for worker in status.workers) for status in statuses]
    found = float(np.mean(token_s)) if token_s else float(np.mean(generating)) if any(generating) else 0.0
    return max(1.0, (found or _most_running(config)) / servers)


def _most_running(config: RunConfig) -> float:
    """Return how many requests may run at once."""
    admitted = (config.queue.max_staleness + 1) * config.learner.groups_per_step * config.rollout.group_size
    slots = config.worker.count * config.worker.episodes
    return float(min(admitted, slots, config.vllm.max_num_seqs * server_count(config)))


def _publications(run_dir: Path, notes: list[str]) -> tuple[tuple[PublicationTimes, ...], float]:
    """Return the times of publications while the servers sampled, and the share of them without that."""
    found = []
    for line in read_json_lines(run_dir / PUBLICATIONS, Line):
        for server in line.get("servers", {}).values():
            transfer_s, pause_s = server.get("transfer_s"), server.get("pause_s")
            if transfer_s is not None and pause_s is not None:
                total_s = server.get("took_s") or transfer_s + pause_s
                found.append(PublicationTimes(transfer_s, pause_s, max(total_s, transfer_s + pause_s)))
    if not found:
        notes.append("it recorded no publications: they count as 0 s")
        return (PublicationTimes(0.0, 0.0, 0.0),), 1.0
    # The first publication brings up the servers, which have no requests yet.
    idle, later = found[0], found[1:][-MAX_STEPS:] or found
    usual_s = float(np.mean([times.transfer_s for times in later]))
    return tuple(later), min(1.0, idle.transfer_s / usual_s) if usual_s else 1.0


def _zero_variance(steps: Sequence[Line]) -> tuple[float, ...]:
    """Return the shares of parts of the run, of the same number of steps each."""
    parts = np.array_split(np.array([line.get("frac_reward_zero_std") or 0.0 for line in steps]), _PARTS)
    return tuple(float(part.mean()) for part in parts if len(part))


def _step_times(steps: Sequence[Line]) -> Mapping[str, float]:
    """Split the learner's own time into a fixed part and one for each token that trains."""
    own_s = np.array([line["step_time"] - line.get("wait_s", 0.0) for line in steps])
    tokens = np.array([float(line.get("tokens_trained", 0)) for line in steps])
    step_s, trained_token_s = _line_above_zero(tokens, own_s)
    return {"step_s": max(1e-6, step_s), "trained_token_s": trained_token_s}


def _line_above_zero(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Fit y = a + b x by least squares with a, b >= 0. Returns a and b."""
    spread = float(np.var(x))
    slope = float(np.mean((x - x.mean()) * (y - y.mean()))) / spread if spread else 0.0
    if slope <= 0:
        return float(y.mean()), 0.0
    start = float(y.mean()) - slope * float(x.mean())
    if start < 0:
        return 0.0, float(np.sum(x * y) / np.sum(x * x))
    return start, slope


def _sum(steps: Sequence[Line], name: str) -> float:
    return float(sum(line.get(name) or 0.0 for line in steps))


def _mean(steps: Sequence[Line], name: str) -> float | None:
    """Return the mean over the steps' rollouts; None if no step has the metric."""
    known = [line for line in steps if line.get(name) is not None]
    weights = [line.get("rollouts") or 1 for line in known]
    return float(np.average([line[name] for line in known], weights=weights)) if known else None


class _View(msgspec.Struct):
    """The part of a `RolloutView` that counts here."""

    turns: int
    sampled_tokens: int
    evaluation: int | None = None
    timings: dict[str, float] = {}


def _views(path: Path) -> Iterator[_View]:
    return (view for view in read_json_lines(path, _View) if view.evaluation is None)
