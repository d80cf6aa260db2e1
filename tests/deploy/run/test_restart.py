"""What follows from the end of a child: a table of histories, with a clock that the test turns."""

from __future__ import annotations

import pytest

from slipstream.deploy.run.process_keeper import (
    MAX_PAUSE_S,
    SCRIPT_LEFT,
    STEADY_AFTER_S,
    TAKEN_OVER,
    Again,
    Done,
    Elsewhere,
    Over,
    RestartPolicy,
    Verdict,
)
from slipstream.deploy.run.processes import ProcessKind
from slipstream.learner.ranks.liveness import RANK_LOST

RESUME = "continue"


class History:
    """One child under a policy that allows three restarts in a row."""

    def __init__(self, role: ProcessKind, times: int = 3) -> None:
        self.now = 1000.0
        self.role = role
        self.policy = RestartPolicy(times, lambda: RESUME, lambda: self.now)

    def life(self, code: int, up_s: float | None = 0.0) -> Verdict:
        """It is up for `up_s` (None: it never answers) and ends."""
        if up_s is None:
            self.now += 10 * STEADY_AFTER_S
        else:
            self.policy.up("it")
            self.now += up_s
        return self.policy.ended("it", self.role, code)


@pytest.mark.parametrize("code", [1, 3, 137, 143])
@pytest.mark.parametrize("role", ["queue", "vllm", "worker"])
def test_it_is_started_again_after_growing_pauses_and_then_no_more(role: ProcessKind, code: int) -> None:
    it = History(role)
    assert [it.life(code) for _ in range(3)] == [Again(1, 1), Again(2, 2), Again(4, 3)]
    assert it.life(code) == Over(code, "once more than deploy.restart = 3 allows")


@pytest.mark.parametrize("role", ["queue", "vllm", "worker"])
def test_what_was_up_for_a_while_begins_a_new_row(role: ProcessKind) -> None:
    it = History(role)
    assert [it.life(1) for _ in range(3)][-1] == Again(4, 3)
    for _ in range(10):
        assert it.life(137, up_s=STEADY_AFTER_S) == Again(1, 1)


def test_a_long_start_is_not_being_up() -> None:
    """A server that loads for minutes and dies each time would be started for ever."""
    it = History("vllm")
    assert it.life(137) == Again(1, 1)
    assert [it.life(1, up_s=None) for _ in range(2)] == [Again(2, 2), Again(4, 3)]
    assert isinstance(it.life(1, up_s=None), Over)
    never = History("vllm")
    assert [isinstance(never.life(137, up_s=None), Over) for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("role", "code", "up_s", "verdict"),
    [
        ("worker", 0, 0.0, Done()),
        ("learner", 0, 0.0, Done()),
        ("learner", 1, 0.0, Over(1, remedy=RESUME)),
        ("learner", 137, 10 * STEADY_AFTER_S, Over(137, remedy=RESUME)),
        ("learner", 2, 0.0, Over(2)),
        ("learner", 130, 0.0, Over(130)),
        ("learner", 143, 0.0, Over(143)),
        ("learner", TAKEN_OVER, 0.0, Elsewhere()),
        ("worker", TAKEN_OVER, 0.0, Again(1, 1)),
        ("queue", 0, 0.0, Again(1, 1)),
        ("vllm", 0, 0.0, Again(1, 1)),
        ("vllm", 0, None, Over(1, "before it ever answered")),
        ("vllm", 1, None, Over(1, "before it ever answered")),
        ("vllm", 137, None, Again(1, 1)),
        ("queue", 137, None, Again(1, 1)),
        ("queue", 2, None, Over(2, "(a wrong setting)")),
        ("vllm", 2, None, Over(2, "(a wrong setting)")),
        ("queue", 2, 0.0, Again(1, 1)),
        ("vllm", 2, 0.0, Again(1, 1)),
        ("worker", 2, 10 * STEADY_AFTER_S, Over(2, "(a wrong setting)")),
    ],
)
def test_the_first_end(role: ProcessKind, code: int, up_s: float | None, verdict: Verdict) -> None:
    assert History(role).life(code, up_s) == verdict


@pytest.mark.parametrize("code", [RANK_LOST, 137, 139])
def test_a_learner_that_lost_a_rank_is_started_again_and_then_no_more(code: int) -> None:
    policy = RestartPolicy(2, lambda: RESUME, lambda: 0.0)

    def ended(code: int) -> Verdict:
        policy.up("learner")
        return policy.ended("learner", "learner", code, lost=True)

    assert [ended(code) for _ in range(2)] == [Again(1, 1), Again(2, 2)]
    assert ended(code) == Over(code, "once more than deploy.restart = 2 allows", RESUME)
    # What was stopped, or is set wrongly, has lost nothing.
    assert [ended(code) for code in (2, 130, 143)] == [Over(2), Over(130), Over(143)]


@pytest.mark.parametrize(("code", "ends_with"), [(0, 1), (1, 1), (137, 137)])
def test_without_restarts_any_death_ends_the_run(code: int, ends_with: int) -> None:
    assert History("queue", times=0).life(code, up_s=10 * STEADY_AFTER_S) == Over(ends_with)


def test_one_child_does_not_use_up_the_restarts_of_another() -> None:
    policy = RestartPolicy(1, lambda: RESUME, lambda: 0.0)
    for name in ("worker-0", "worker-1"):
        policy.up(name)
        assert policy.ended(name, "worker", 1) == Again(1, 1)


def test_a_script_that_ends_before_the_run_is_finished_has_failed() -> None:
    policy = RestartPolicy(1, lambda: RESUME, lambda: 0.0)
    policy.up("learner")
    assert policy.ended("learner", "learner", 0, goes_on=True) == Over(1, SCRIPT_LEFT, RESUME)


def test_a_server_that_was_removed_from_its_run_is_done_and_one_that_failed_is_not() -> None:
    policy = RestartPolicy(1, lambda: RESUME, lambda: 0.0)
    policy.up("vllm-0")
    assert policy.ended("vllm-0", "vllm", 0, leaves=True) == Done()
    policy.up("vllm-1")
    assert policy.ended("vllm-1", "vllm", 1, leaves=True) == Again(1, 1)


def test_a_pause_has_a_limit() -> None:
    it = History("worker", times=10**9)
    pauses = [verdict.pause_s for verdict in (it.life(1) for _ in range(2000)) if isinstance(verdict, Again)]
    assert len(pauses) == 2000
    assert max(pauses) == pauses[-1] == MAX_PAUSE_S
