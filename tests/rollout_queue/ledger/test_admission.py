"""Admission in a simulated loop: the bound holds, the depth adapts, nothing ever stands still."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.rollout_queue.ledger.admission import Admission, Grant, QueueLoad, StepFacts
from tests.kit import config


def admission(k: int, b: int, depth: float | str = "auto", zero_variance: str = "refill", **queue: int) -> Admission:
    learner = {"groups_per_step": b, "zero_variance": zero_variance}
    return Admission(config(queue={"max_staleness": k, "depth": depth, **queue}, learner=learner))


def load(outstanding: int = 0, version: int = 0, served: int | None = 0, size: int = 0, session: int = 1) -> QueueLoad:
    return QueueLoad(outstanding, size, version, served, session)


@dataclass
class Made:
    issued: int
    version: int


@dataclass
class Loop:
    """Workers, learner and weight sync in simulated time: a publication follows every `every` steps and lands
    `publish_s` later; a group is made of one version, the served one at its issue. `durations`: seconds per group.
    The learner trains B groups a step, oldest first, and drops those that are over age. With `flat`,
    the share of groups without variance, it drops these too, a step takes B groups in all, and the next step is filled
    while one trains."""

    k: int
    b: int
    every: int
    publish_s: float
    step_s: float
    seed: int
    tail: float
    depth: float | str = "auto"
    workers: int = 64
    flat: float = 0.0
    time: float = 0.0
    version: int = 0
    served: int = 0
    issued: int = 0
    over_age: int = 0
    over_age_since_step: int = 0
    staleness: list[int] = field(default_factory=list)
    idle_since: float = 0.0

    def __post_init__(self) -> None:
        self.admission = admission(self.k, self.b, self.depth, "drop" if self.flat else "refill")
        self.random = random.Random(self.seed)
        self.making: list[tuple[float, int, int]] = []
        self.publications: list[tuple[float, int]] = []
        self.ready: list[Made] = []
        self.draft: list[Made] = []
        self.judged = 0
        self.training: list[Made] = []
        self.step_ends = float("inf")

    @property
    def outstanding(self) -> int:
        return len(self.making) + len(self.ready) + len(self.draft) + len(self.training)

    def run(self, steps: int) -> None:
        """Raises AssertionError if nothing can happen any more."""
        while self.version < steps:
            self.start_step()
            self.admit()
            upcoming = [self.step_ends, *(t for t, *_ in self.making[:1]), *(t for t, _ in self.publications)]
            self.time = min(upcoming)
            assert self.time < float("inf"), f"stands still at version {self.version}, served {self.served}"
            self.let_happen()

    def admit(self) -> None:
        while len(self.making) < self.workers:
            grant = self.admission.grant(load(self.outstanding, self.version, self.served))
            if not grant.count:
                self.admission.observe_refusal(grant)
                return
            assert self.outstanding < (self.k + 1 - (self.version - self.served)) * self.b
            duration = 1.0 + self.tail * (self.random.paretovariate(1.2) - 1)
            heapq.heappush(self.making, (self.time + duration, self.issued, self.served))
            self.issued += 1

    @property
    def full(self) -> bool:
        if not self.flat:
            return len(self.draft) == self.b
        return bool(self.draft) and self.judged % self.b == 0

    def start_step(self) -> None:
        if self.training and not self.flat:
            return
        self.fill()
        if self.training or not self.full:
            return
        self.training, self.draft, self.judged = self.draft, [], 0
        self.step_ends = self.time + self.step_s
        self.waited = self.time - self.idle_since

    def fill(self) -> None:
        trains_at = self.version + bool(self.training)
        self.ready.sort(key=lambda made: (made.version, made.issued))
        while self.ready and not self.full:
            made = self.ready.pop(0)
            self.judged += 1
            is_late = trains_at - made.version > self.k
            if is_late or (self.flat and self.random.random() < self.flat):
                self.over_age += is_late
                self.over_age_since_step += is_late
                self.admission.observe_ack(str(trains_at), dropped=1, is_step=False)
            else:
                self.draft.append(made)

    def let_happen(self) -> None:
        while self.making and self.making[0][0] <= self.time:
            _, issued, version = heapq.heappop(self.making)
            self.ready.append(Made(issued, version))
        for at, version in list(self.publications):
            if at <= self.time:
                self.served = max(self.served, version)
                self.publications.remove((at, version))
        if self.step_ends <= self.time:
            self.staleness += [self.version - made.version for made in self.training]
            share = self.waited / (self.waited + self.step_s)
            self.admission.observe_ack(str(self.version), dropped=0, is_step=True)
            self.version += 1
            self.admission.observe_step(StepFacts(len(self.training), self.over_age_since_step, share))
            self.training, self.step_ends, self.idle_since = [], float("inf"), self.time
            self.over_age_since_step = 0
            if self.version % self.every == 0:
                self.publications.append((self.time + self.publish_s, self.version))


loops = st.fixed_dictionaries(
    {
        "b": st.integers(1, 6),
        "publish_s": st.floats(0, 8),
        "step_s": st.floats(0.1, 8),
        "seed": st.integers(0, 9999),
        "tail": st.sampled_from([0.0, 0.5, 3.0]),
        "workers": st.integers(1, 64),
        "flat": st.sampled_from([0.0, 0.3, 0.8]),
        "depth": st.one_of(st.just("auto"), st.floats(1, 8)),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k + 1))), loops)
def test_every_loop_makes_progress_within_the_bound(k_and_every: tuple[int, int], settings: dict[str, object]) -> None:
    """Any weight_sync.every up to K + 1, however slow the publication and long the tail. `run` fails on a standstill,
    `admit` on a ticket beyond the bound."""
    k, every = k_and_every
    loop = Loop(k=k, every=every, **settings)  # type: ignore[arg-type]
    loop.run(steps=30)
    assert max(loop.staleness) <= k


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k + 1))), loops)
def test_i2_groups_that_finish_in_order_are_never_over_age(
    k_and_every: tuple[int, int], settings: dict[str, object]
) -> None:
    k, every = k_and_every
    loop = Loop(k=k, every=every, **{**settings, "tail": 0.0})  # type: ignore[arg-type]
    loop.run(steps=30)
    assert loop.over_age == 0


@settings(max_examples=50, deadline=None)
@given(loops)
def test_bound_0_is_strict_alternation(settings: dict[str, object]) -> None:
    loop = Loop(k=0, every=1, **settings)  # type: ignore[arg-type]
    loop.run(steps=20)
    assert set(loop.staleness) == {0}
    assert loop.over_age == 0
    if not loop.flat:  # else a step of which nothing is left takes B more
        assert loop.issued <= 21 * loop.b


@pytest.mark.parametrize("workers", [16, 64])
@pytest.mark.parametrize("tail", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_a_long_tail_makes_the_adaptive_depth_neither_slow_nor_wasteful(k: int, tail: float, workers: int) -> None:
    """Next to the greatest depth: hardly slower, and no more discarded; stragglers come at any depth."""

    def run(depth: float | str) -> Loop:
        loop = Loop(k=k, b=16, every=1, publish_s=0.2, step_s=1.0, seed=1, tail=tail, depth=depth, workers=workers)
        loop.run(steps=200)
        return loop

    adaptive, deepest = run("auto"), run(k + 1.0)
    assert adaptive.time < 1.3 * deepest.time
    assert adaptive.over_age / adaptive.issued <= deepest.over_age / deepest.issued + 0.01


def test_without_a_tail_the_adaptive_depth_is_as_fast_and_keeps_groups_younger() -> None:
    def run(depth: float | str) -> Loop:
        loop = Loop(k=4, b=16, every=1, publish_s=0.2, step_s=1.0, seed=1, tail=0.0, depth=depth)
        loop.run(steps=200)
        return loop

    adaptive, deepest = run("auto"), run(5.0)
    assert adaptive.time < 1.02 * deepest.time
    assert sum(adaptive.staleness) < 0.7 * sum(deepest.staleness)


def test_depth_grows_where_it_holds_workers_back_and_shrinks_where_groups_come_too_late() -> None:
    control = admission(k=3, b=4)
    assert control.depth == 2.0
    waited = StepFacts(trained=4, dropped_for_age=0, wait_share=0.2)

    def refuse(outstanding: int) -> None:
        control.observe_refusal(control.grant(load(outstanding)))

    control.observe_step(waited)
    assert control.depth == 2.0, "no worker was held back"
    refuse(8)
    control.observe_step(StepFacts(trained=4, dropped_for_age=0, wait_share=0.04))
    assert control.depth == 2.0, "the learner did not wait"
    control.observe_step(waited)
    assert control.depth == 2.0, "the refusal was of another step"
    for _ in range(20):
        refuse(1000)
        control.observe_step(waited)
    assert control.depth == 4.0, "K + 1 is the end"
    control.observe_step(StepFacts(trained=4, dropped_for_age=1, wait_share=0.2))
    assert control.depth == 4.0, "one of five is a straggler"
    control.observe_step(StepFacts(trained=4, dropped_for_age=2, wait_share=0.2))
    assert control.depth == pytest.approx(3.2)
    for _ in range(20):
        control.observe_step(StepFacts(trained=1, dropped_for_age=3, wait_share=0.0))
    assert control.depth == 1.0


@pytest.mark.parametrize(("depth", "k"), [("auto", 0), (2.5, 4)])
def test_depth_stays_where_it_may_not_adapt(depth: float | str, k: int) -> None:
    control = admission(k=k, b=4, depth=depth)
    before = control.depth
    control.observe_refusal(control.grant(load(outstanding=1000)))
    control.observe_step(StepFacts(trained=4, dropped_for_age=0, wait_share=0.9))
    control.observe_step(StepFacts(trained=1, dropped_for_age=9, wait_share=0.0))
    assert control.depth == before


@pytest.mark.parametrize(
    ("granted", "now"),
    [
        (8, load()),
        (5, load(outstanding=3)),
        (0, load(outstanding=8)),
        (8, load(version=3, served=0)),
        (4, load(version=4, served=0)),
        (0, load(version=4, served=0, outstanding=4)),
        (0, load(version=5, served=0)),
    ],
)
def test_grants_fill_the_depth_or_what_the_lag_leaves_of_the_bound(granted: int, now: QueueLoad) -> None:
    """d = 2 steps of B = 4; the bound is K + 1 = 5 steps less the servers' lag."""
    assert admission(k=4, b=4).grant(now).count == granted


@pytest.mark.parametrize(
    ("blame", "now"),
    [
        ("a learner: none has begun a session", load(session=0)),
        ("a server: none is serving", load(served=None)),
        ("the queue is full: 10 groups under way, queue.capacity_groups = 10", load(outstanding=10)),
        ("the queue is full: 2048 bytes, queue.capacity_bytes = 2048", load(size=2048)),
        (
            "the staleness bound: 0 groups under way, the servers 5 versions behind the learner",
            load(version=5, served=0),
        ),
        ("the limit of work ahead: 8 groups under way, 8 allowed = 2.00 steps of 4", load(outstanding=8)),
    ],
)
def test_i7_a_refused_ticket_names_its_reason(blame: str, now: QueueLoad) -> None:
    grant = admission(k=4, b=4, capacity_groups=10, capacity_bytes=2048, max_group_bytes=1024).grant(now)
    assert grant.count == 0
    assert blame in (grant.blocked_by or "")


def test_i3_grants_stop_at_capacity() -> None:
    control = admission(k=9, b=4, depth=10.0, capacity_groups=7)
    assert control.grant(load(outstanding=5)) == Grant(2)


def test_a_depth_below_one_step_would_never_fill_a_step() -> None:
    assert admission(k=4, b=4, depth=0.5).grant(load()).count == 4
