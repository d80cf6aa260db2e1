"""The simulation of a run: what limits it shows, and its sums agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.deploy.planning import simulation
from slipstream.deploy.planning.advice import OWN, plan
from slipstream.deploy.planning.calibration import calibrated, sharing_cores
from slipstream.deploy.planning.rates import EpisodeTimes, Measured, PublicationTimes, Rates, Record
from slipstream.deploy.planning.serving import Curve, SimulatedServer
from slipstream.deploy.planning.simulation import Prediction, Simulation
from tests.kit.config import config

# Groups of 4 episodes of 20 tokens, 4 groups a step: 320 tokens a step.
RATES = Rates(
    episodes=tuple(EpisodeTimes(2, tokens) for tokens in (10.0, 20.0, 30.0)),
    curve=Curve.line(0.01, 0.001),
    publications=(PublicationTimes(0.02, 0.005, 0.04),),
    zero_variance=(0.0,),
    step_s=0.05,
    trained_token_s=0.0,
)


def settings(**given: Any) -> Any:
    sections = {
        "rollout": {"group_size": 4},
        "learner": {"groups_per_step": 4, "zero_variance": "refill"},
        "queue": {"max_staleness": 4},
        "worker": {"episodes": 32},
        "vllm": {"max_num_seqs": 32},
    }
    return config(sections, given)


def simulate(rates: Rates = RATES, steps: int = 100, **given: Any) -> Prediction:
    return Simulation(settings(**given), rates).run(steps)


def test_a_slow_learner_decides() -> None:
    found = simulate(replace(RATES, step_s=2.0))
    assert found.steps_per_s == pytest.approx(0.5, rel=0.02)
    assert found.learner_wait < 0.02
    assert found.worker_wait > 0.5


def test_slow_servers_decide() -> None:
    found = simulate(replace(RATES, curve=Curve.line(0.0, 0.01)))
    # 100 tokens a second, whatever runs, and 320 of them a step.
    assert found.steps_per_s == pytest.approx(100 / 320, rel=0.06)
    assert found.learner_wait > 0.8
    assert found.server_idle < 0.02


def test_few_slots_decide() -> None:
    found = simulate(worker={"episodes": 4}, vllm={"max_num_seqs": 32})
    assert found.running <= 4
    assert found.worker_wait < 0.05
    assert found.steps_per_s < 0.7 * simulate().steps_per_s


def test_slow_tools_hold_no_slot_and_slow_judges_hold_up_no_turn() -> None:
    """More episodes are opened in their place, as far as admission allows."""
    slow = replace(RATES, episodes=(EpisodeTimes(2, 20.0, tools_s=0.5, judge_s=0.5),), curve=Curve.line(0.0, 0.01))
    wide = simulate(slow, queue={"max_staleness": 8, "depth": 9})
    assert wide.steps_per_s == pytest.approx(100 / 320, rel=0.1)
    assert simulate(slow, queue={"max_staleness": 0}).steps_per_s < 0.9 * wide.steps_per_s


def test_without_staleness_generation_and_training_alternate() -> None:
    """I2."""
    found = simulate(queue={"max_staleness": 0})
    assert found.staleness_max == 0
    assert found.drops == {}
    together = simulate(queue={"max_staleness": 4})
    assert found.steps_per_s < together.steps_per_s
    assert together.staleness_max <= 4


@pytest.mark.parametrize("zero_variance", ["refill", "drop", "keep"])
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_every_ticket_ends_once_and_none_trains_too_old(zero_variance: str, bound: int) -> None:
    """I1, I2: at every moment issued = trained + dropped + outstanding, of which none trains beyond the bound."""
    learner = {"groups_per_step": 4, "zero_variance": zero_variance}
    run = settings(learner=learner, queue={"max_staleness": bound})
    simulation = Simulation(run, replace(RATES, zero_variance=(0.5,)))
    found = simulation.run(60)
    assert found.issued == found.trained + found.dropped + found.outstanding
    assert 0 <= found.outstanding <= (bound + 1) * 4
    assert found.staleness_max <= bound
    assert ("zero_variance" in found.drops) == (zero_variance != "keep")
    if zero_variance != "drop":
        assert found.trained == 60 * 4


@pytest.mark.parametrize("bound", [0, 2, 4])
def test_one_more_of_anything_makes_no_run_slower(bound: int) -> None:
    queue = {"max_staleness": bound}
    alone = simulate(queue=queue)
    for more in ({"vllm": {"max_num_seqs": 32, "count": 2}}, {"worker": {"episodes": 32, "count": 2}}):
        assert simulate(queue=queue, **more).steps_per_s > 0.95 * alone.steps_per_s


def test_publications_that_are_overtaken_are_skipped() -> None:
    """I2: slow publications hold admission, and never make tokens older than the bound."""
    slow = replace(RATES, publications=(PublicationTimes(3.0, 0.1, 3.2),), step_s=0.2)
    found = simulate(slow, queue={"max_staleness": 2})
    assert found.staleness_max <= 2
    assert found.steps_per_s < 3 / 3.2 + 0.1


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate() == simulate()


def test_a_server_shares_its_speed_and_splits_tokens_at_a_swap() -> None:
    server = SimulatedServer[str](Curve.line(0.0, 0.5), 2, version=0)
    server.add(0.0, 4.0, "a")
    server.add(0.0, 8.0, "b")
    server.add(0.0, 1.0, "waits")
    # Two run at a token a second each.
    assert server.next_end() == pytest.approx(4.0)
    server.swap(2.0, version=1, pause_s=1.0)
    assert server.next_end() == pytest.approx(5.0)
    assert server.end(5.0) == ("a", [(1, pytest.approx(2.0)), (0, pytest.approx(2.0))])
    assert server.end(6.0) == ("waits", [(1, pytest.approx(1.0))])
    # Alone, two tokens a second: it has 3 left.
    assert server.next_end() == pytest.approx(7.5)


@pytest.mark.parametrize(
    ("running", "token_s"), [(0, 0.01), (1, 0.01), (4.5, 0.015), (8, 0.02), (16, 0.04), (32, 0.08)]
)
def test_a_curve_has_straight_lines_between_its_points_and_beyond_the_last(running: float, token_s: float) -> None:
    curve = Curve(((1.0, 0.01), (8.0, 0.02), (16.0, 0.04)))
    assert curve.token_s(running) == pytest.approx(token_s)
    assert curve.scaled(2).token_s(running) == pytest.approx(2 * token_s)


def test_prompts_that_a_server_has_not_kept_take_its_time() -> None:
    """A group's first turns share one prompt. Later turns have theirs again after each publication."""
    slow = replace(RATES, curve=replace(RATES.curve, prefill_s=0.001), prompt_tokens=20.0)
    assert simulate(slow).steps_per_s < 0.9 * simulate().steps_per_s
    rarely = simulate(slow, weight_sync={"every": 4}, queue={"max_staleness": 4})
    assert rarely.steps_per_s > simulate(slow).steps_per_s


def test_the_share_of_groups_without_variance_follows_the_run() -> None:
    """With refill, the time of a step grows as 1 / (1 - share), so that the mean share does not tell it."""
    refilled = simulate(replace(RATES, zero_variance=(0.0, 0.9)))
    assert refilled.steps_per_s < simulate(replace(RATES, zero_variance=(0.45,))).steps_per_s


def test_a_publication_into_an_idle_server_takes_less_time() -> None:
    slow = replace(RATES, publications=(PublicationTimes(0.5, 0.0, 1.0),), running=16.0)
    alternate = {"queue": {"max_staleness": 0}}
    assert (
        simulate(replace(slow, idle_publication=0.1), **alternate).steps_per_s
        > 1.3 * simulate(slow, **alternate).steps_per_s
    )


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.6])
def test_rates_are_fitted_to_the_run_that_they_are_of(factor: float) -> None:
    """Servers that limit the run come out as fast as they were, others as they are."""
    limiting = replace(RATES, curve=Curve.line(0.0, 0.01))
    measured = Simulation(settings(), replace(limiting, curve=limiting.curve.scaled(factor))).run(100)
    found = calibrated(record(limiting, measured))
    assert found.curve.token_s(8) == pytest.approx(0.08 * factor, rel=0.03)
    learner = replace(RATES, step_s=2.0)
    measured = simulate(replace(learner, step_s=3.0))
    assert calibrated(record(learner, measured)).curve == learner.curve


def record(rates: Rates, measured: Prediction) -> Record:
    names = Measured.__struct_fields__
    seen = {name: getattr(measured, name) for name in names if name != "steps"}
    return Record(settings(), rates, Measured(steps=99, **seen), ())


def test_servers_on_one_cpu_machine_share_its_cores() -> None:
    one, two = settings(vllm={"count": 1}), settings(vllm={"count": 2})
    assert sharing_cores(RATES, one, two).curve == RATES.curve.scaled(2)
    slow = replace(RATES, curve=Curve.line(0.0, 0.01))
    beside = plan(one, slow, steps=60, measured_with=one)
    gains = {change.text: change.gain for change in beside.changes}
    assert gains["one more vLLM server"] > 0.3
    assert abs(gains["vllm.count = 2, on the same cores"]) < 0.1
    assert plan(two, slow, steps=60, measured_with=one).prediction.steps_per_s == pytest.approx(
        beside.prediction.steps_per_s, rel=0.1
    )
    elsewhere = settings(vllm={"servers": ["http://a:8100", "http://b:8100"]})
    apart = plan(elsewhere, slow, steps=60, measured_with=one)
    assert apart.prediction.steps_per_s > 1.3 * beside.prediction.steps_per_s
    assert apart.notes[-1] == OWN


def test_a_run_that_could_never_fill_a_step_is_not_simulated_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_MAX_EVENTS", 20_000)
    drop = {"groups_per_step": 4, "zero_variance": "drop"}
    with pytest.raises(RuntimeError, match="more than 20,000 turns and swaps in 0 of its steps"):
        simulate(replace(RATES, zero_variance=(1.0,)), learner=drop)
