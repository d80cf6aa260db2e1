"""The rule that names what limits a run, next to simulations of the run with each part at twice its speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from slipstream.deploy.planning.advice import limit_inputs, plan, with_counts
from slipstream.deploy.planning.rates import EpisodeTimes, PublicationTimes, Rates
from slipstream.deploy.planning.serving import Curve
from slipstream.deploy.planning.simulation import Simulation
from slipstream.protocol.config import RunConfig
from slipstream.rollout_queue.observe.limits import LimitInputs, limit_of, scaling_of
from tests.kit.config import config

STEPS = 40


def run(bound: int, slots: int = 32, requests: int = 32) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {
        "rollout": {"group_size": 4},
        "learner": {"groups_per_step": 8, "zero_variance": "refill"},
        "queue": {"max_staleness": bound},
        "worker": {"episodes": slots},
        "vllm": {"max_num_seqs": requests},
    }
    return config(sections)


def rates(tools_s: float = 0.0, judge_s: float = 0.0, publication_s: float = 0.02, step_s: float = 0.05) -> Rates:
    return Rates(
        episodes=tuple(EpisodeTimes(2, tokens, tools_s, judge_s) for tokens in (10.0, 20.0, 30.0)),
        curve=Curve.line(0.02, 0.0002),
        publications=(PublicationTimes(publication_s / 2, publication_s / 10, publication_s),),
        zero_variance=(0.0,),
        step_s=step_s,
        trained_token_s=0.0,
    )


def at_twice_its_speed(config: RunConfig, of: Rates) -> Iterator[tuple[str, RunConfig, Rates]]:
    """Yield each part with the run in which it is twice as fast, or the bound is one version more."""
    yield "learner", config, replace(of, step_s=of.step_s / 2)
    yield "servers", config, replace(of, curve=of.curve.scaled(0.5))
    yield "tools", config, replace(of, episodes=tuple(replace(each, tools_s=each.tools_s / 2) for each in of.episodes))
    yield "judge", config, replace(of, episodes=tuple(replace(each, judge_s=each.judge_s / 2) for each in of.episodes))
    brief = tuple(times.scaled(0.5) for times in of.publications)
    yield "publication", config, replace(of, publications=brief)
    queue = config.queue.model_copy(update={"max_staleness": config.queue.max_staleness + 1})
    yield "staleness bound", config.model_copy(update={"queue": queue}), of
    worker = config.worker.model_copy(update={"episodes": 2 * config.worker.episodes})
    yield "workers' slots", config.model_copy(update={"worker": worker}), of


@pytest.mark.parametrize(
    ("part", "config", "of"),
    [
        ("learner", run(4), rates(step_s=2.0)),
        ("learner", run(1), rates(step_s=3.0, judge_s=0.5)),
        ("learner", run(0), rates(step_s=3.0, tools_s=0.2)),
        ("servers", run(4), rates()),
        ("servers", run(4, slots=8, requests=8), rates(judge_s=3.0)),
        ("servers", run(1), rates(tools_s=0.1)),
        ("staleness bound", run(0), rates(tools_s=4.0)),
        ("staleness bound", run(0), rates(step_s=0.7)),
        ("staleness bound", run(0), rates(publication_s=0.6)),
        ("judge", run(2, slots=64, requests=64), rates(judge_s=3.0, tools_s=0.2)),
        ("tools", run(3, slots=128, requests=128), rates(tools_s=4.0)),
        ("publication", run(4, slots=64, requests=64), rates(publication_s=2.0, step_s=0.2)),
    ],
)
def test_the_rule_names_what_brings_most_at_twice_its_speed(part: str, config: RunConfig, of: Rates) -> None:
    before = Simulation(config, of).run(STEPS).steps_per_s
    gains = {
        name: Simulation(changed, faster).run(STEPS).steps_per_s / before - 1
        for name, changed, faster in at_twice_its_speed(config, of)
    }
    limit = plan(config, of, STEPS).limit
    assert limit.part == part, (limit.text, gains)
    assert gains[part] > 0.8 * max(gains.values()), gains


@pytest.mark.parametrize(
    ("config", "of"),
    [
        (run(4), rates()),
        (run(4), rates(step_s=2.0)),
        (run(4, slots=16, requests=64), rates()),
        (run(4, slots=64, requests=32), rates()),
        (run(2, slots=64, requests=64), rates(tools_s=4.0)),
        (run(1), rates(step_s=0.5)),
        (run(0), rates(step_s=0.7)),
    ],
)
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 2), (4, 3)])
def test_one_more_server_and_worker_bring_what_a_simulation_says(
    config: RunConfig, of: Rates, servers: int, workers: int
) -> None:
    config = with_counts(config, servers, workers)
    found = Simulation(config, of).run(STEPS)
    running = max(1.0, found.running)
    twice = of.curve.tokens_per_s(running) / of.curve.tokens_per_s(running / 2) - 1
    inputs = msgspec.structs.replace(limit_inputs(config, of, found), more=twice)
    scaling = scaling_of(inputs, config, servers, workers, ranks=1)
    for part, more in {
        "server": with_counts(config, servers=servers + 1),
        "worker": with_counts(config, workers=workers + 1),
    }.items():
        gain = Simulation(more, of).run(STEPS).steps_per_s / found.steps_per_s - 1
        assert scaling.one_more[part] == pytest.approx(gain, abs=0.25), part


def test_a_bound_of_0_limits_before_servers_do() -> None:
    """One version of staleness takes no machine, and brings about as much as twice the servers."""
    inputs = LimitInputs(0.9, 0.25, 0.0, 0.0, 0.0, 0.05, slots=128, requests=128)
    assert limit_of(inputs, run(0)).part == "staleness bound"
    assert limit_of(inputs, run(1)).part == "servers"


def test_slots_limit_where_servers_would_run_more() -> None:
    """Servers at twice their speed would bring more still; more slots cost nothing."""
    few = plan(run(4, slots=8, requests=64), rates(), STEPS)
    assert few.limit.part == "workers' slots"
    assert "all 8 are taken, and the servers would run 64 requests at once" in few.limit.text
    more = Simulation(run(4, slots=16, requests=64), rates()).run(STEPS)
    assert more.steps_per_s > 1.5 * few.prediction.steps_per_s
