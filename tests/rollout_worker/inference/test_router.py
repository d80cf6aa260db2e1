"""Where requests go: to servers that serve, back to the one that holds the prefix, else to the least loaded."""

import asyncio
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.inference.router import Affinity, Leave, Router, ServerLoad, Siblings, stays

NEED = 100


def server(name, state=ServerState.SERVING, version=1, changed_at=1.0, url=None):
    return Server(name, url or f"http://{name}", state, version, changed_at=changed_at)


def router_of(*names):
    router = Router()
    router.update([server(name) for name in names])
    return router


def start(router, affinities, need=NEED, **options):
    """Place a request and have it run."""
    placed = router.place(affinities, need, **options)
    router.begin(placed.name, need)
    return placed.name


@pytest.mark.parametrize(
    ("current", "best", "expected"),
    [
        (ServerLoad(0, 9), ServerLoad(0, 0), True),
        (ServerLoad(99, 1), ServerLoad(0, 0), True),  # less than one request like this
        (ServerLoad(100, 1), ServerLoad(0, 0), False),  # the other stands idle
        (ServerLoad(400, 4), ServerLoad(0, 1), True),  # its episodes are in their tools
        (ServerLoad(401, 4), ServerLoad(0, 1), False),
        (ServerLoad(1000, 8), ServerLoad(1000, 8), True),
        (ServerLoad(2400, 8), ServerLoad(1000, 8), True),
        (ServerLoad(2401, 8), ServerLoad(1000, 8), False),
    ],
)
def test_an_episode_returns_to_its_prefix_unless_its_server_is_clearly_overloaded(current, best, expected):
    assert stays(current, best, NEED) is expected


LOADS = st.builds(ServerLoad, st.integers(0, 10**6), st.integers(0, 100))


@given(LOADS, LOADS, st.integers(1, 10**5), st.integers(0, 10**5))
def test_more_load_at_home_never_makes_an_episode_stay(current, best, need, more):
    if not stays(current, best, need):
        assert not stays(current._replace(tokens=current.tokens + more), best, need)


@given(LOADS, LOADS, st.integers(1, 10**5))
def test_an_episode_never_moves_to_a_server_that_carries_as_much(current, best, need):
    assume(best.tokens >= current.tokens)
    assume(best != ServerLoad(0, 0))
    assert stays(current, best, need)


@given(st.integers(1, 40), st.integers(1, 5))
def test_new_requests_spread_evenly(requests, servers):
    names = [f"s{number}" for number in range(servers)]
    router = router_of(*names)
    for _ in range(requests):
        start(router, [Affinity()])
    loads = [router.load_of(name).tokens for name in names]
    assert max(loads) - min(loads) <= NEED


def test_one_long_request_weighs_as_many_short_ones():
    router = router_of("a", "b")
    start(router, [Affinity()], need=800)
    assert [start(router, [Affinity()]) for _ in range(8)] == ["b"] * 8


def test_an_episode_in_its_tools_is_no_load_but_stays_tied():
    router = router_of("a", "b")
    waiting = [Affinity() for _ in range(3)]
    for affinity in waiting:
        affinity.siblings = waiting[0].siblings
    start(router, waiting, need=300)
    router.end("a", 300)
    assert router.load_of("a") == ServerLoad(0, 3)
    assert start(router, [Affinity()]) == "b", "of two that run nothing the one with fewer ties"
    assert start(router, waiting[:1]) == "a"


def test_a_group_begins_on_one_server_and_siblings_follow_the_first_that_moves():
    router = router_of("a", "b", "c")
    start(router, [Affinity()], need=50)  # a carries something, so the group begins on b
    group = [Affinity() for _ in range(4)]
    siblings = Siblings()
    for affinity in group:
        affinity.siblings = siblings
    assert start(router, group, need=400) == "b"
    router.update([server("a"), server("b", ServerState.DOWN), server("c")])
    router.end("b", 400)
    assert [start(router, [affinity]) for affinity in group] == ["c"] * 4
    assert [affinity.moves for affinity in group] == [1] * 4
    assert (router.load_of("b"), router.load_of("c")) == (ServerLoad(0, 0), ServerLoad(400, 4))


def test_parts_of_a_group_that_is_too_large_for_one_server_spread():
    router = router_of("a", "b")
    siblings = Siblings()
    assert [start(router, [Affinity(siblings=siblings)]) for _ in range(4)] == ["a", "b", "a", "b"]


def test_an_idle_server_takes_over():
    router = router_of("a")
    affinities = [Affinity() for _ in range(16)]
    for affinity in affinities:
        start(router, [affinity])
    router.update([server("a"), server("b")])
    moved = []
    for affinity in affinities:
        router.end("a", NEED)
        moved.append(start(router, [affinity]))
    assert moved == ["b"] * 4 + ["a"] * 12, "until it no longer carries less than half, but for four requests"


def test_a_failed_server_is_avoided_while_there_is_another():
    router = router_of("a", "b")
    affinity = Affinity()
    start(router, [affinity])
    assert router.place([affinity], NEED, avoid="a").name == "b"
    alone = router_of("a")
    assert alone.place([Affinity()], NEED, avoid="a").name == "a"


def test_a_server_that_is_left_alone_gets_nothing():
    router = router_of("a", "b")
    assert router.place([Affinity()], NEED, avoid="b", admits=lambda name: name == "b").name == "b"
    assert router.place([Affinity()], NEED, admits=lambda name: False) is None


def test_a_distrusted_server_is_used_again_only_after_its_record_changed():
    router = router_of("a")
    assert router.distrust("a").name == "a"
    assert router.distrust("a") is None
    for state, changed_at in [(ServerState.SERVING, 1.0), (ServerState.SYNCING, 2.0)]:
        router.update([server("a", state, changed_at=changed_at)])
        assert router.place([Affinity()], NEED) is None
    router.update([server("a", changed_at=3.0)])
    assert router.place([Affinity()], NEED).name == "a"


def test_a_version_seen_in_samples_outlives_a_registry_that_lags():
    router = router_of("a")
    router.saw_version("a", 5)
    assert router.update([server("a", version=4, changed_at=2.0)]) == []
    assert router.place([Affinity()], NEED).version == 5
    router.saw_version("a", 3)
    assert router.place([Affinity()], NEED).version == 5
    assert router.update([server("a", version=5, changed_at=3.0)]) == [], "a publication, heard of late"


def test_a_server_without_a_proven_version_is_not_used():
    router = Router()
    router.update([server("a", version=None)])
    assert not router.serving


@pytest.mark.parametrize(
    ("now", "how", "why"),
    [
        ([server("a", ServerState.STALE)], Leave.ABORT, "it is stale"),
        ([server("a", ServerState.SYNCING)], Leave.ABORT, "it is syncing"),
        ([server("a", ServerState.QUARANTINED)], Leave.CUT, "it is quarantined"),
        ([server("a", ServerState.DOWN)], Leave.CUT, "it is down"),
        ([server("a", ServerState.JOINING, version=None)], Leave.CUT, "it is joining"),
        ([server("a", version=None)], Leave.CUT, "it is serving"),
        ([], Leave.CUT, "it was taken out of the registry"),
        ([server("a", url="http://other", version=2)], Leave.CUT, "it serves at http://other now"),
        ([server("a", changed_at=2.0)], Leave.CUT, "it was restarted"),
    ],
)
def test_a_server_that_left_is_named(now, how, why):
    router = router_of("a")
    (left,) = router.update(now)
    assert (left.server.name, left.how, left.why) == ("a", how, why)
    assert router.update(now) == []


def test_a_publication_is_no_leave():
    router = router_of("a")
    assert router.update([server("a", version=2, changed_at=2.0)]) == []
    assert router.update([server("a", version=2, changed_at=2.0)]) == []


NAMES = st.sampled_from("abc")
REGISTRY = st.dictionaries(NAMES, st.sampled_from(list(ServerState)))


class Routing(RuleBasedStateMachine):
    """Groups open, ask, end their requests and close; servers come, go, and are avoided, distrusted, left alone."""

    groups = Bundle("groups")
    requests = Bundle("requests")

    @initialize()
    def begin(self):
        self.router = Router()
        self.time = 0.0
        self.trusted = set()
        self.alone = set()
        self.running = []
        self.open = []

    @rule(states=REGISTRY)
    def update(self, states):
        self.time += 1.0
        before = set(self.trusted)
        left = self.router.update([server(name, state, changed_at=self.time) for name, state in states.items()])
        self.trusted = {name for name, state in states.items() if state is ServerState.SERVING}
        assert before - self.trusted <= {gone.server.name for gone in left} <= before

    @rule(name=NAMES)
    def distrust(self, name):
        self.router.distrust(name)
        self.trusted.discard(name)

    @rule(names=st.sets(NAMES))
    def leave_alone(self, names):
        self.alone = names

    @rule(target=groups, size=st.integers(1, 4))
    def open_group(self, size):
        siblings = Siblings()
        group = [Affinity(siblings=siblings) for _ in range(size)]
        self.open.append(group)
        return group

    @rule(target=requests, group=groups, whole=st.booleans(), need=st.integers(0, 50), avoid=st.none() | NAMES)
    def ask(self, group, whole, need, avoid):
        affinities = group if whole else group[:1]
        before = [affinity.server for affinity in affinities]
        placed = self.router.place(affinities, need, avoid, lambda name: name not in self.alone)
        usable = self.trusted - self.alone
        barred = {name for name in usable if any(self.router.taints.bars(name, 1, one.born) for one in affinities)}
        usable -= barred
        if not usable:
            assert placed is None
            assert [affinity.server for affinity in affinities] == before
            return None
        assert placed.name in usable, "I5"
        assert placed.name != avoid or usable == {avoid}
        assert {affinity.server for affinity in affinities} == {placed.name}
        self.router.begin(placed.name, need)
        self.running.append((placed.name, need))
        return placed.name, need

    @rule(request=consumes(requests))
    def end(self, request):
        if request is not None:
            self.router.end(*request)
            self.running.remove(request)

    @rule(group=consumes(groups))
    def close(self, group):
        self.router.release(group)
        self.router.release(group)
        self.open.remove(group)

    @invariant()
    def loads_add_up(self):
        tokens = Counter()
        for name, need in self.running:
            tokens[name] += need
        ties = Counter(one.server for group in self.open for one in group if one.server is not None)
        for name in "abc":
            assert self.router.load_of(name) == ServerLoad(tokens[name], ties[name])
        assert set(self.router.serving) == self.trusted


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_server_that_drains_takes_no_new_episode_and_no_next_turn():
    router = router_of("a", "b")
    tied = Affinity("a")
    left = router.update([server("a", ServerState.DRAINING), server("b")])
    assert [(of.server.name, of.how) for of in left] == [("a", Leave.FINISH)]
    assert router.draining == {"a"}
    assert start(router, [tied]) == "b"
    assert start(router, [Affinity()]) == "b"
    assert router.update([server("b")]) == []
    assert router.draining == set()


async def test_the_requests_on_a_server_that_drains_go_on_and_the_queue_hears_when_they_have_ended():
    asked = []

    async def report(of):
        raise AssertionError("nothing is wrong with it")

    pool = ServerPool(report, ask=lambda: asked.append(pool.draining))
    pool.update([server("a")])
    async with pool.request([Affinity()], 10, 10):
        pool.update([server("a", ServerState.DRAINING)])
        assert pool.draining == {"a": 1}
        assert not pool.serving
        await asyncio.sleep(0.05)
    assert asked == [{"a": 1}, {"a": 0}]
    pool.update([])
    assert pool.draining == {}
