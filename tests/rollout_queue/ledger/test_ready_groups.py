"""What is leased, and what a change of a server drops, next to the plain rules over all ready groups (I5)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slipstream.protocol.messages import BeginSession, LeaseAck, Server, ServerState
from slipstream.rollout_queue.ledger import leases, servers, tickets
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import (
    Decision,
    GroupFacts,
    Refusal,
    SampledBy,
    ServerRecord,
    StoreContents,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry, lost
from tests.kit import config

NAMES = ["a", "b", "c"]
CONFIG = config(queue={"max_staleness": 9, "lease_timeout_s": 120.0})


def _ranges(count: int) -> st.SearchStrategy[list[dict[str, tuple[int, int]]]]:
    """Up to `count` groups: the first version that each server sampled, and how many more."""
    of_one = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1)
    return st.lists(of_one, min_size=1, max_size=count)


class GroupsOfManyServers(RuleBasedStateMachine):
    """Groups of several servers come, servers change, and a learner leases, loses, returns and trains groups."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger, self.fleet = Ledger(CONFIG, StoreContents(), self.now), ServerRegistry()

    def apply(self, decision: Decision) -> None:
        self.ledger.apply(decision, self.now)
        for server in decision.servers:
            self.fleet.apply(server)

    @property
    def ready(self) -> list[TicketRecord]:
        return sorted(
            self.ledger.tickets(TicketState.READY), key=lambda record: (record.group.oldest_version, record.index)
        )

    def is_tainted(self, record: TicketRecord) -> bool:
        return self.fleet.distrusted(record.group, record.serial) is not None

    @initialize()
    def everything_starts(self) -> None:
        self.apply(leases.begin(self.ledger, BeginSession(0, 0, 1000, resume=False), []))
        for name in NAMES:
            for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
                self.apply(servers.put(self.fleet, self.ledger, Server(name, name, state, 2), 0.0))

    # Groups.

    @rule(ranges=_ranges(6))
    def groups_come(self, ranges: list[dict[str, tuple[int, int]]]) -> None:
        decision = tickets.issue(self.ledger, "w", len(ranges))
        self.apply(decision)
        for record, of_it in zip(decision.tickets, ranges, strict=True):
            sampled = tuple(SampledBy(name, first, first + more) for name, (first, more) in sorted(of_it.items()))
            facts = GroupFacts(1, 1, min(by.oldest for by in sampled), sampled)
            try:
                self.fleet.check_group(facts, record.serial)
            except Refusal:
                self.apply(tickets.fail(self.ledger, record, "failed:x", retryable=True))
            else:
                self.apply(tickets.submit(self.ledger, record, facts))

    # Servers.

    def change(self, decision: Decision) -> None:
        """Apply a change of servers. It drops each ready group that it taints, and none that it does not."""
        before = {record.id for record in self.ready if self.is_tainted(record)}
        groups = self.ready
        self.apply(decision)
        must = {record.id for record in groups if self.is_tainted(record) or self.is_lost(record, decision.servers)}
        dropped = {record.id for record in decision.trains}
        assert must - before <= dropped <= must
        assert len(dropped) == len(decision.trains)

    def is_lost(self, record: TicketRecord, changed: Iterable[ServerRecord]) -> bool:
        return any(lost(of, record.group) for of in changed)

    @rule(name=st.sampled_from(NAMES), state=st.sampled_from(list(ServerState)), version=st.integers(0, 8))
    def server_changes(self, name: str, state: ServerState, version: int) -> None:
        with suppress(Refusal):
            self.change(servers.put(self.fleet, self.ledger, Server(name, name, state, version), 0.0))

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, 8), good=st.booleans())
    def server_is_judged(self, name: str, version: int, good: bool) -> None:
        self.server_changes(name, ServerState.JOINING, 0)
        self.server_changes(name, ServerState.SYNCING, 0)
        self.server_changes(name, ServerState.SERVING if good else ServerState.QUARANTINED, version)

    @rule(ranges=_ranges(6), count=st.integers(1, 4), versions=st.lists(st.integers(2, 8), max_size=3), data=st.data())
    def proofs_come_late(
        self, ranges: list[dict[str, tuple[int, int]]], count: int, versions: list[int], data: st.DataObject
    ) -> None:
        """Groups are set aside and come back, one server after the other."""
        self.groups_come(ranges)
        self.lease("k", count, 0, data)
        for name, version in zip(NAMES, versions, strict=False):
            self.server_changes(name, ServerState.SERVING, version)
            self.lease("k", count, 0, data)

    @rule(name=st.sampled_from(NAMES))
    def server_drains(self, name: str) -> None:
        with suppress(Refusal):
            self.change(servers.drain(self.fleet, self.ledger, name, 0.0))

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    def servers_are_removed(self, names: list[str]) -> None:
        self.change(servers.remove(self.fleet, self.ledger, names))

    @rule(version=st.integers(1, 9))
    def a_session_distrusts_what_the_one_before_left_unproven(self, version: int) -> None:
        self.apply(servers.distrust_unproven(self.fleet, self.ledger, version))

    # The learner.

    @rule(lease_id=st.sampled_from(["k", "l"]), count=st.integers(0, 4), lost_ones=st.integers(0, 2), data=st.data())
    def lease(self, lease_id: str, count: int, lost_ones: int, data: st.DataObject) -> None:
        at_hand = self.ledger.leased(lease_id)
        have = [record.id for record in at_hand[lost_ones:]]
        have += data.draw(st.lists(st.sampled_from([*(r.id for r in self.ready), "9999.0"]), max_size=3))
        fresh, dropped = [], []
        for record in self.ready:
            if record.id not in have and len(fresh) < count:
                if self.is_tainted(record):
                    dropped.append(record.id)
                elif self.fleet.unproven(record.group) is None:
                    fresh.append(record.id)
        held = [record for record in self.ready if record.id in have]
        again = {record.id for record in held if self.fleet.unproven(record.group) is None}
        tainted = {record.id for record in (*self.ready, *at_hand[:lost_ones]) if self.is_tainted(record)}
        named = {record.id for record in held} | {record.id for record in at_hand[:lost_ones]}
        decision = leases.lease(self.ledger, self.fleet, lease_id, count, have)
        leased = [record.id for record in decision.tickets if record.state is TicketState.LEASED]
        assert leased[: len(fresh)] == fresh, "those with the oldest tokens, in their order"
        assert set(leased[len(fresh) :]) == again - tainted
        gone = [record.id for record in decision.tickets if record.state is TicketState.DROPPED]
        assert set(gone) == {*dropped, *(named & tainted)}
        assert len(decision.tickets) == len({record.id for record in decision.tickets})
        if data.draw(st.booleans()):  # else the learner has hung up
            self.apply(decision)

    @rule(lease_id=st.sampled_from(["k", "l"]))
    def release(self, lease_id: str) -> None:
        self.apply(leases.release(self.ledger, lease_id))

    @rule()
    def leases_lapse(self) -> None:
        self.now += 121.0
        self.apply(tickets.expire(self.ledger, self.now))

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        leased = [record.id for record in self.ledger.tickets(TicketState.LEASED)]
        if leased:
            run = self.ledger.run
            trained = data.draw(st.lists(st.sampled_from(leased), min_size=1, unique=True))
            ack = LeaseAck(run.session, trained, step=run.step + 1, version=run.version + 1)
            self.apply(leases.ack(self.ledger, self.fleet, ack, {}))

    @rule(back=st.integers(0, 2))
    def learner_resumes(self, back: int) -> None:
        run = self.ledger.run
        message = BeginSession(max(0, run.step - back), run.version, 1000, resume=True)
        decision = leases.begin(self.ledger, message, [])
        assert decision.run is not None
        self.apply(decision)
        self.a_session_distrusts_what_the_one_before_left_unproven(decision.run.version)

    # What must always hold.

    @invariant()
    def the_proofs_that_groups_wait_for_are_named(self) -> None:
        assert set(self.ledger.ready.awaited(self.fleet)) == {
            by.server
            for record in self.ready
            for by in record.group.servers
            if self.fleet.unproven(GroupFacts(servers=(by,))) is not None
        }

    @invariant()
    def i5_nothing_waits_for_a_proof_that_cannot_come(self) -> None:
        known = [self.fleet.record(name) for name in NAMES]
        assert not any(lost(of, record.group) for record in self.ready for of in known if of is not None)


TestReadyGroups = GroupsOfManyServers.TestCase
TestReadyGroups.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
