"""What waiting costs, in simulated time: real admission and real slots."""

import pytest

from tests.kit.waiting import HeldSlots, NewSlots, Scene, simulate, tail

STEPS = 30


def held(total=64):
    """A worker that holds a group's slots until the group is handed in."""
    return lambda: HeldSlots(total)


def new(total=64, resets=False):
    return lambda: NewSlots(total, 8 * total, resets)


@pytest.fixture(scope="module")
def plain():
    return simulate(Scene(steps=STEPS), new())


def test_a_judge_of_a_second_costs_less_than_a_tenth(plain):
    judged = simulate(Scene(judge_s=1.0, steps=STEPS), new())
    assert judged.step_s < 1.1 * plain.step_s
    assert simulate(Scene(judge_s=1.0, steps=16), held()).step_s > 2.0 * plain.step_s


def test_a_tool_of_heavy_tail_costs_no_more_than_with_four_times_the_slots():
    """And no more groups come too late, with `queue.depth` left to admission."""
    times = {"best": 0.0, "found": 0.0}
    dropped = {"best": 0, "found": 0}
    for seed in range(4):
        for name, slots in (("best", held(256)), ("found", new())):
            run = simulate(Scene(tool=tail, steps=40), slots, seed)
            times[name] += run.step_s
            dropped[name] += run.dropped
            assert run.staleness_mean < 2.1
    assert times["found"] < 1.1 * times["best"]
    assert dropped["found"] <= 1.1 * dropped["best"]
    assert simulate(Scene(tool=tail, steps=16), held()).step_s > 2.0 * times["best"] / 4


def test_no_more_is_open_than_keeps_the_slots_busy(plain):
    """Without anything to wait for, more would only grow old."""
    assert plain.max_open <= 2 * 64
    deep = simulate(Scene(steps=STEPS), held(256))
    assert plain.step_s < 1.1 * deep.step_s
    assert plain.staleness_mean < deep.staleness_mean - 0.5


@pytest.mark.parametrize(
    "scene",
    [
        Scene(steps=STEPS, workers=2),
        Scene(steps=STEPS, workers=2, tool=tail),
        Scene(steps=STEPS, workers=2, reset_s=2.0, judge_s=2.0),
    ],
    ids=["plain", "tail", "resets"],
)
def test_of_two_workers_neither_starves(scene):
    found = simulate(scene, new(32, resets=scene.reset_s > 0))
    assert min(found.by_worker) > 0.4 * sum(found.by_worker)
