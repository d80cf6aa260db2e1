"""I5: what the worker drops for a failed proof, and what it keeps, next to the queue's own rule."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_queue.ledger.records import GroupFacts, Refusal, SampledBy
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_worker.inference.router import Affinity, Router

Q, S, Y, J, D = (
    ServerState.QUARANTINED,
    ServerState.SERVING,
    ServerState.SYNCING,
    ServerState.JOINING,
    ServerState.DOWN,
)


class Scene:
    """A queue's fleet of one server, and a worker that hears of each change. `serial`: tickets issued."""

    def __init__(self):
        self.fleet, self.router, self.time, self.serial = ServerRegistry(), Router(), 0.0, 0
        for state, version in [(J, None), (Y, None), (S, 1)]:
            self.put(state, version)

    def put(self, state, version=None):
        """False if the queue does not allow the change."""
        self.time += 1.0
        try:
            record = self.fleet.decide(Server("a", "http://a", state, version), self.time, self.serial)
        except Refusal:
            return False
        if record is not None:
            self.fleet.apply(record)
        self.router.update(self.fleet.servers)
        return True

    def ticket(self):
        self.serial += 1
        return self.serial - 1, Affinity(born=self.router.tick)

    def refused(self, serial, versions):
        return self.fleet.distrusted(GroupFacts(servers=tuple(SampledBy("a", v, v) for v in versions)), serial)


STEPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([Q, S, Y, J, D]), st.integers(0, 1)),
    st.tuples(st.just("fails and is proven again"), st.integers(0, 1), st.integers(0, 1)),
    st.tuples(st.just("ticket"), st.none(), st.none()),
    st.tuples(st.just("sample"), st.none(), st.integers(0, 100)),
)


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=40))
def test_i5_what_the_worker_keeps_the_queue_takes_and_what_it_drops_the_queue_would_refuse(steps):
    scene, version, tickets = Scene(), 1, []
    for step, state, number in steps:
        if step == "put":
            wanted = version + number if state in (Q, S) else None
            if scene.put(state, wanted) and state in (Q, S):
                version = wanted
        elif step == "fails and is proven again":
            for what, by in [(Q, state), (Y, 0), (S, number)]:
                if scene.put(what, version + by) and what is not Y:
                    version += by
        elif step == "ticket":
            tickets.append(scene.ticket())
        elif tickets:
            # A turn, as the sampler has it: where the router allows it, at the version that is proven there.
            _, affinity = tickets[number % len(tickets)]
            if (server := scene.router.place([affinity], 1)) is not None:
                affinity.sampled.add(("a", server.version))
    for serial, affinity in tickets:
        kept = scene.router.tainted(affinity) is None
        refused = scene.refused(serial, [sampled for _, sampled in affinity.sampled])
        assert kept == (refused is None)


def test_what_a_server_sampled_before_and_after_a_failed_proof_is_handed_in():
    """The queue would otherwise take the versions 1 and 3 for a range, with the failed 2 in it."""
    scene = Scene()
    serial, affinity = scene.ticket()
    affinity.sampled.add(("a", scene.router.place([affinity], 1).version))
    for state, version in [(Q, 2), (Y, None), (S, 3)]:
        scene.put(state, version)
    affinity.sampled.add(("a", scene.router.place([affinity], 1).version))
    assert affinity.sampled == {("a", 1), ("a", 3)}
    assert scene.router.tainted(affinity) is None
    assert scene.refused(serial, [1, 3]) is None
    assert scene.fleet.distrusted(GroupFacts(servers=(SampledBy("a", 1, 3),)), serial) == "a"


def test_a_server_proven_again_at_the_version_that_failed_serves_new_tickets_only():
    """Nobody can tell an old ticket's tokens of it from those of the failed weights."""
    scene = Scene()
    _, old = scene.ticket()
    scene.router.place([old], 1)
    for state, version in [(Q, 2), (Y, None), (S, 2)]:
        scene.put(state, version)
    assert scene.router.place([old], 1) is None
    assert scene.router.barred([old])
    serial, new = scene.ticket()
    assert scene.router.place([new], 1).version == 2
    assert scene.refused(serial, [2]) is None
    assert scene.refused(0, [2]) == "a"
    scene.put(S, 3)
    assert scene.router.place([old], 1).version == 3
