from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Server, ServerState
from rollout_worker.inference.pool import Affinity, Router


def server(name, state=ServerState.SERVING, version=1, changed_at=1.0):
    return Server(name, f"http://{name}", state, version, changed_at=changed_at)


def router_of(*names):
    router = Router()
    router.update([server(name) for name in names])
    return router


NAMES = st.sampled_from("abc")
STATES = st.sampled_from(list(ServerState))
ACTIONS = st.one_of(
    st.tuples(st.just("open"), st.integers(1, 4)),
    st.tuples(st.just("turn"), st.integers(0, 30)),
    st.tuples(st.just("close"), st.integers(0, 30)),
    st.tuples(st.just("update"), st.dictionaries(NAMES, STATES)),
    st.tuples(st.just("distrust"), NAMES),
)


@given(st.lists(ACTIONS, max_size=60))
def test_i5_only_serving_servers_are_given_episodes_and_loads_add_up(actions):
    router, groups, trusted = Router(), [], set()
    for time, (action, value) in enumerate(actions, start=1):
        placed = None
        if action == "open":
            groups.append([Affinity() for _ in range(value)])
            placed = router.place(groups[-1])
        elif action == "turn" and groups:
            group = groups[value % len(groups)]
            placed = router.place(group[:1])
        elif action == "close" and groups:
            router.release(groups.pop(value % len(groups)))
        elif action == "update":
            router.update([server(name, state, changed_at=float(time)) for name, state in value.items()])
            trusted = {name for name, state in value.items() if state is ServerState.SERVING}
        elif action == "distrust":
            router.distrust(value)
            trusted.discard(value)
        assert placed is None or placed.name in trusted
        assert router.serving == bool(trusted)
        loads = Counter(affinity.server for group in groups for affinity in group if affinity.server)
        assert all(router.load_of(name) == loads[name] for name in "abc")


@given(st.integers(1, 40), st.integers(1, 5))
def test_f20_new_episodes_spread_evenly(affinities, servers):
    names = [f"s{number}" for number in range(servers)]
    router = router_of(*names)
    for _ in range(affinities):
        router.place([Affinity()])
    loads = [router.load_of(name) for name in names]
    assert max(loads) - min(loads) <= 1


def test_f20_one_long_group_leaves_others_to_the_other_server():
    router = router_of("a", "b")
    router.place([Affinity() for _ in range(8)])
    assert [router.place([Affinity()]).name for _ in range(8)] == ["b"] * 8


def test_an_episode_stays_with_its_server():
    router = router_of("a", "b")
    first, second = Affinity(), Affinity()
    router.place([first])
    router.place([second])
    assert [router.place([first]).name, router.place([second]).name] == ["a", "b"]
    assert (first.server, second.server) == ("a", "b")


def test_a_group_begins_on_one_server():
    router = router_of("a", "b")
    group = [Affinity() for _ in range(4)]
    router.place(group)
    assert {affinity.server for affinity in group} == {"a"}


def test_f21_episodes_move_when_their_server_leaves():
    router = router_of("a", "b")
    affinity = Affinity()
    assert router.place([affinity]).name == "a"
    router.update([server("a", ServerState.DOWN), server("b")])
    assert router.place([affinity]).name == "b"
    assert router.load_of("a") == 0
    assert affinity.server == "b"


def test_f21_an_idle_server_takes_episodes_over():
    router = router_of("a")
    affinities = [Affinity() for _ in range(4)]
    for affinity in affinities:
        router.place([affinity])
    router.update([server("a"), server("b")])
    assert [router.place([affinity]).name for affinity in affinities] == ["b", "a", "a", "a"]


def test_a_failed_server_is_avoided_while_there_is_another():
    router = router_of("a", "b")
    affinity = Affinity()
    router.place([affinity])
    assert router.place([affinity], avoid="a").name == "b"
    alone = router_of("a")
    alone.place([affinity := Affinity()])
    assert alone.place([affinity], avoid="a").name == "a"


def test_f16_a_distrusted_server_is_used_again_only_after_its_record_changed():
    router = router_of("a")
    assert router.distrust("a").name == "a"
    assert router.distrust("a") is None
    router.update([server("a")])
    assert router.place([Affinity()]) is None
    router.update([server("a", ServerState.SYNCING, changed_at=2.0)])
    assert router.place([Affinity()]) is None
    router.update([server("a", changed_at=3.0)])
    assert router.place([Affinity()]).name == "a"


def test_a_version_seen_in_samples_outlives_a_registry_that_lags():
    router = router_of("a")
    router.saw_version("a", 5)
    router.update([server("a", version=4)])
    assert router.place([Affinity()]).version == 5
    router.saw_version("a", 3)
    assert router.place([Affinity()]).version == 5


def test_a_server_without_a_proven_version_is_not_used():
    router = Router()
    router.update([server("a", version=None)])
    assert not router.serving
