"""I1 to I3 and I5 under any order of events, crashes and resumes included, on the real store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from slipstream.protocol import reasons
from slipstream.protocol.messages import BeginSession, Fingerprint, LeaseAck, Server, ServerState, SessionStart
from slipstream.rollout_queue.ledger import leases, servers, tickets
from slipstream.rollout_queue.ledger.admission import Admission, QueueLoad
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import (
    HOLDS_PAYLOAD,
    LIVE,
    OUTSTANDING,
    Decision,
    GroupFacts,
    Refusal,
    RowOutcome,
    SampledBy,
    StoreContents,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit import config
from tests.kit.messages import SERVER
from tests.kit.queue_machine import SabotagedQueue

K, B, ATTEMPTS, GROUP_BYTES, MAX_AGE_S = 2, 2, 3, 400, 90.0
CONFIG = config(
    queue={
        "max_staleness": K,
        "capacity_groups": 5,
        "capacity_bytes": 4 * GROUP_BYTES,
        "max_group_bytes": 1024,
        "ticket_attempts": ATTEMPTS,
        "ticket_max_age_s": MAX_AGE_S,
        "depth": 3.0,
    },
    learner={"groups_per_step": B},
    worker={"episode_timeout_s": 60.0},
)


def facts_of(size: int, tokens: int, oldest: int, newest: int) -> GroupFacts:
    return GroupFacts(size, tokens, oldest, (SampledBy(SERVER, oldest, newest),))


def outcome_of(record: TicketRecord) -> RowOutcome:
    """Rewards that differ from ticket to ticket, and within the groups of some."""
    return RowOutcome(mean=0.1 * (record.serial % 7), variance=0.03 * (record.serial % 4))


class QueueMachine(SabotagedQueue):
    """Workers, a learner, weight sync and a saboteur take turns at one queue."""

    run_config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint = 0
        self.version_at = {0: 0}
        self.history: dict[str, TicketRecord] = {}
        self.accepted: dict[str, bytes] = {}
        self.versions = [0]
        self.admission = Admission(CONFIG)

    def restart_queue(self) -> None:
        super().restart_queue()
        self.issued_at = dict.fromkeys((r.id for r in self.ledger.tickets(TicketState.ISSUED)), self.now)

    def commit(self, decision: Decision, payloads: Mapping[str, bytes] | None = None) -> None:
        self.history |= {record.id: record for record in decision.tickets}
        super().commit(decision, payloads)

    def pick(self, data: st.DataObject, *states: TicketState) -> TicketRecord | None:
        found = [record for state in states for record in self.ledger.tickets(state)]
        return data.draw(st.sampled_from(sorted(found, key=lambda r: r.serial))) if found else None

    @rule(seconds=st.sampled_from([1.0, 45.0, 61.0, 121.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.commit(tickets.expire(self.ledger, self.now))
        ages = [self.now - self.issued_at[r.id] for r in self.ledger.tickets(TicketState.ISSUED)]
        assert max(ages, default=0.0) < MAX_AGE_S, "a ticket is held for ever"

    # Weight sync.

    @initialize()
    def server_joins(self) -> None:
        self.put_server(ServerState.JOINING)
        self.publish()

    @rule()
    def proof_fails(self) -> None:
        self.put_server(ServerState.SYNCING)
        self.put_server(ServerState.QUARANTINED)

    # Workers.

    @rule(wanted=st.integers(1, 8))
    def ask_for_tickets(self, wanted: int) -> None:
        run, served = self.ledger.run, self.fleet.served_version
        load = QueueLoad(self.ledger.outstanding, self.ledger.bytes, run.version, served, run.session)
        count = min(wanted, self.admission.grant(load).count)
        if run.finished or count == 0:
            return
        assert served is not None
        decision = tickets.issue(self.ledger, "w", count)
        self.issued_at |= {record.id: self.now for record in decision.tickets}
        self.commit(decision)
        assert self.ledger.outstanding <= (K + 1 - (run.version - served)) * B, "more than the bound admits"

    @rule()
    def heartbeat(self) -> None:
        for record in self.ledger.tickets(TicketState.ISSUED):
            self.ledger.renew_ticket(record.id, self.now)

    @rule(data=st.data(), lag=st.integers(0, 3), size=st.sampled_from([GROUP_BYTES, GROUP_BYTES // 2]))
    def submit(self, data: st.DataObject, lag: int, size: int) -> None:
        record = self.pick(data, TicketState.ISSUED)
        if record is not None:
            self.hand_in(record, lag, size)

    @rule(lag=st.integers(0, 1), on=st.booleans())
    def all_goes_well(self, lag: int, on: bool) -> None:
        """The usual course up to a full lease, or on to a checkpoint, so that what comes after it is met often."""
        self.publish()
        self.ask_for_tickets(8)
        for record in list(self.ledger.tickets(TicketState.ISSUED)):
            self.hand_in(record, lag, GROUP_BYTES // 2)
        self.lease("a", 3, 0)
        if on and self.ledger.count(TicketState.LEASED):
            self.step(3, repeat=False, late_verdict=False)
            self.save_checkpoint()

    def hand_in(self, record: TicketRecord, lag: int, size: int) -> None:
        oldest = max(0, record.version - lag)
        facts = facts_of(size, 7, oldest, self.ledger.run.version)
        if self.fleet.distrusted(facts, record.serial) is not None:
            self.commit(tickets.fail(self.ledger, record, "rejected:unverified_server", retryable=True))
            return
        if self.ledger.bytes + size > CONFIG.queue.capacity_bytes:
            with pytest.raises(Refusal, match=r"raise queue\.capacity_bytes"):
                tickets.submit(self.ledger, record, facts)
            return
        decision = tickets.submit(self.ledger, record, facts, outcome_of(record))
        first, end = self.ledger.run.given_up
        if first < end and oldest < end and facts.servers[0].newest >= first:
            assert decision.tickets[0].state is TicketState.REISSUED, "I2: by weights that a resume gave up"
            self.commit(decision)
            return
        payload = record.id.encode()
        self.commit(decision, {record.id: payload})
        self.accepted[record.id] = payload

    @rule(data=st.data(), retryable=st.booleans())
    def give_back(self, data: st.DataObject, retryable: bool) -> None:
        record = self.pick(data, TicketState.ISSUED)
        if record is not None:
            self.commit(tickets.fail(self.ledger, record, "failed:test", retryable))

    # The learner.

    @initialize()
    def learner_starts(self) -> None:
        self.commit(leases.begin(self.ledger, BeginSession(0, 0, 10, resume=False), []))

    @rule(lease_id=st.sampled_from(["a", "b"]), count=st.integers(1, 3), lost=st.integers(0, 2))
    def lease(self, lease_id: str, count: int, lost: int) -> None:
        """The learner holds all of its lease but for the `lost` last ones, also what it lost by a lapse."""
        had = [record.id for record in self.ledger.leased(lease_id)]
        have = [*had[: len(had) - lost], *(r.id for r in list(self.ledger.tickets(TicketState.READY))[:lost])]
        decision = leases.lease(self.ledger, self.fleet, lease_id, count, have)
        leased = [record for record in decision.tickets if record.state is TicketState.LEASED]
        fresh = [record for record in leased if record.id not in have]
        assert [r.group.oldest_version for r in fresh] == sorted(r.group.oldest_version for r in fresh)
        assert not any(self.fleet.distrusted(r.group, r.serial) for r in leased), "I5: leased although it is tainted"
        self.commit(decision)
        held = {record.id for record in self.ledger.leased(lease_id)}
        gone = leases.revoked(self.ledger, self.fleet, lease_id, have)
        assert {i for i in have if i not in gone} <= held, "the learner does not hear what it has lost"

    @rule(lease_id=st.sampled_from(["a", "b"]))
    def release(self, lease_id: str) -> None:
        self.commit(leases.release(self.ledger, lease_id))

    @precondition(lambda self: self.ledger.count(TicketState.LEASED) and not self.ledger.run.finished)
    @rule(count=st.integers(1, 3), repeat=st.booleans(), late_verdict=st.booleans())
    def step(self, count: int, repeat: bool, late_verdict: bool) -> None:
        """The learner asks what was revoked, trains the rest, and hears of nothing until it acknowledges."""
        run = self.ledger.run
        leased = list(self.ledger.tickets(TicketState.LEASED))[:count]
        gone = {i for r in leased for i in leases.revoked(self.ledger, self.fleet, r.lease_id or "", [r.id])}
        for record in leased:
            tainted = self.fleet.distrusted(record.group, record.serial) is not None
            assert tainted == (record.id in gone), "I5: what a failed proof taints is not trained, leased or not"
        over_age = {r.id for r in leased if run.version - r.group.oldest_version > K} - gone
        trained = [r.id for r in leased if r.id not in gone | over_age]
        if late_verdict:
            self.proof_fails()
        ack = LeaseAck(
            session=run.session,
            trained=trained,
            dropped={**dict.fromkeys(gone, reasons.UNVERIFIED_SERVER), **dict.fromkeys(over_age, reasons.OVERAGE)},
            step=run.step + 1 if trained else None,
            version=run.version + 1 if trained else None,
        )
        self.commit(leases.ack(self.ledger, self.fleet, ack, {}))
        first = run.sessions[-1].version
        aged = {i: self.history[i] for i in over_age}
        assert {i for i, r in aged.items() if r.state is TicketState.REISSUED} == {
            i for i, r in aged.items() if r.version < first
        }, "a row is lost to a resume"
        if trained:
            self.versions.append(self.ledger.run.version)
            self.version_at[self.ledger.run.step] = self.ledger.run.version
        if repeat:
            ended = self.store.records([i for i in (*ack.trained, *ack.dropped) if self.ledger.get(i) is None])
            assert not leases.ack(self.ledger, self.fleet, ack, ended), "a repeated ack changes something"

    @rule()
    def save_checkpoint(self) -> None:
        self.checkpoint = self.ledger.run.step
        oldest = leases.kept_checkpoints(self.ledger, self.checkpoint)[0]
        first = self.store.first_forgotten_after(oldest)
        self.commit(leases.checkpointed(self.ledger, self.checkpoint, first, indices_kept=1))

    @rule(back=st.integers(0, 2))
    def learner_killed_and_resumed(self, back: int) -> None:
        step = max(self.ledger.run.pruned_step, self.checkpoint - back)
        forgotten = self.store.forgotten_after(step)
        before = self.ledger.run
        decision = leases.begin(self.ledger, BeginSession(step, self.version_at[step], 10, resume=True), forgotten)
        for record in decision.tickets:
            if record.state is TicketState.READY and self.ledger.get(record.id).state is TicketState.TRAINED:  # type: ignore[union-attr]
                assert before.version + 1 - record.group.oldest_version <= K, "I2: an over-age group came back"
        self.commit(decision)
        self.checkpoint = step
        self.versions.append(self.ledger.run.version)

    @precondition(lambda self: self.ledger.issued > 10)
    @rule()
    def finish(self) -> None:
        self.commit(leases.finish(self.ledger))
        assert self.ledger.outstanding == 0

    # What must always hold.

    @invariant()
    def old_tickets_are_let_go_and_no_others(self) -> None:
        below = self.ledger.run.pruned_below
        kept = {i: record for i, record in self.history.items() if record.index >= below}
        assert self.store.records(list(self.history)) == kept
        gone = [record for record in self.history.values() if record.index < below]
        assert all(self.ledger.was_pruned(record.id) for record in gone)
        assert {r.state for r in gone} <= {TicketState.FORGOTTEN, TicketState.DROPPED, TicketState.REISSUED}
        assert all(r.step <= self.ledger.run.pruned_step for r in gone if r.state is TicketState.FORGOTTEN and r.step)

    @invariant()
    def i1_every_ticket_is_in_one_place_and_no_row_is_trained_twice(self) -> None:
        records = list(self.history.values())
        counts = self.ledger.summary()
        assert len(records) == counts.issued
        assert counts.issued == counts.trained + counts.dropped + counts.reissued + counts.outstanding
        assert sorted(r.serial for r in records) == list(range(counts.issued))
        assert all(r.reason for r in records if r.state in (TicketState.DROPPED, TicketState.REISSUED))
        trained = Counter(r.index for r in records if r.state in (TicketState.TRAINED, TicketState.FORGOTTEN))
        assert max(trained.values(), default=0) <= 1
        for index in range(self.ledger.next_index):
            states = [r.state for r in sorted(records, key=lambda r: r.attempt) if r.index == index]
            assert set(states[:-1]) <= {TicketState.REISSUED}
            assert (states[-1] is TicketState.REISSUED) == (index in self.ledger.to_reissue)

    @invariant()
    def i1_no_row_fails_more_often_than_it_may(self) -> None:
        assert all(r.failures <= ATTEMPTS for r in self.ledger.to_reissue.values())

    @invariant()
    def i3_groups_and_bytes_never_exceed_capacity(self) -> None:
        held = [r for state in OUTSTANDING for r in self.ledger.tickets(state)]
        assert len(held) == self.ledger.outstanding <= CONFIG.queue.capacity_groups
        assert sum(r.group.bytes for r in held) == self.ledger.bytes <= CONFIG.queue.capacity_bytes
        kept = [r for state in HOLDS_PAYLOAD for r in self.ledger.tickets(state)]
        assert sum(r.group.bytes for r in kept) == self.ledger.kept_bytes <= CONFIG.queue.capacity_bytes, (
            "the bytes do not add up"
        )

    @invariant()
    def payloads_of_live_groups_are_kept_and_no_others(self) -> None:
        live = {r.id for state in HOLDS_PAYLOAD for r in self.ledger.tickets(state)}
        assert self.store.payloads(sorted(self.accepted)) == {i: Payload.of(self.accepted[i]) for i in live}

    @invariant()
    def memory_is_what_a_restart_would_load(self) -> None:
        fresh = Ledger(self.run_config, self.store.load(), self.now)
        for state in LIVE:
            assert {r.id: r for r in fresh.tickets(state)} == {r.id: r for r in self.ledger.tickets(state)}
        assert fresh.run == self.ledger.run
        assert fresh.to_reissue == self.ledger.to_reissue
        assert fresh.next_to_reissue(99) == self.ledger.next_to_reissue(99)
        assert [r.id for r in self.ledger.next_to_reissue(99)] == [
            r.id for _, r in sorted(self.ledger.to_reissue.items())
        ]
        assert self.ledger.held_by("w") == list(self.ledger.tickets(TicketState.ISSUED))
        assert fresh.ready.choose(self.fleet, 99) == self.ledger.ready.choose(self.fleet, 99)
        assert fresh.first_needed() == self.ledger.first_needed()
        assert (fresh.next_index, fresh.bytes, fresh.kept_bytes, fresh.tokens_sampled) == (
            self.ledger.next_index,
            self.ledger.bytes,
            self.ledger.kept_bytes,
            self.ledger.tokens_sampled,
        )
        assert +fresh.counts == +self.ledger.counts
        assert +fresh.drops == +self.ledger.drops
        assert +fresh.tokens_dropped == +self.ledger.tokens_dropped

    @invariant()
    def versions_never_go_back(self) -> None:
        assert self.versions == sorted(set(self.versions))


class LearnableQueue(QueueMachine):
    """A queue that chooses rows, of two parts of a data set."""

    run_config = CONFIG.model_copy(
        update={"task": config(task={"order": "learnable", "mix": {"easy": 0.25, "hard": 0.75}}).task}
    )

    @initialize()
    def a_worker_names_the_data_set(self) -> None:
        data = Fingerprint("1", "t", "c", {}, rows=7, parts={"easy": 2, "hard": 5})
        self.commit(Decision(run=msgspec.structs.replace(self.ledger.run, data=data)))

    @invariant()
    def i1_a_row_keeps_its_index_and_rows_are_chosen_as_after_a_restart(self) -> None:
        rows: dict[int, int | None] = {}
        for record in self.history.values():
            assert record.row == rows.setdefault(record.index, record.row)
        assert self.ledger.rows is not None
        if not self.ledger.rows.is_ready:
            return
        fresh = Ledger(self.run_config, self.store.load(), self.now)
        assert tickets.issue(fresh, "w", 12) == tickets.issue(self.ledger, "w", 12)
        assert fresh.rows is not None
        assert fresh.rows.status() == self.ledger.rows.status()


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestI1I2I3 = QueueMachine.TestCase
TestI1I2I3.settings = SETTINGS
TestLearnableRows = LearnableQueue.TestCase
TestLearnableRows.settings = SETTINGS


# Its own ledger for the cases that want a name.


class Bench:
    """A queue without admission: tickets in, groups in, steps."""

    def __init__(self, keep_checkpoints: int = 2, **queue: object) -> None:
        self.config = config(queue={"max_staleness": K, **queue}, learner={"keep_checkpoints": keep_checkpoints})
        self.ledger = Ledger(self.config, StoreContents(), 0.0)
        self.fleet = ServerRegistry()
        self.begin(0, resume=False)

    def apply(self, decision: Decision, now: float = 0.0) -> tuple[TicketRecord, ...]:
        self.ledger.apply(decision, now)
        for server in decision.servers:
            self.fleet.apply(server)
        return decision.tickets

    def serve(self) -> None:
        for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
            server = Server(SERVER, "u", state, self.ledger.run.version)
            self.apply(servers.put(self.fleet, self.ledger, server, 0.0))

    def begin(self, step: int, resume: bool) -> None:
        self.apply(leases.begin(self.ledger, BeginSession(step, step, 10, resume=resume), []))

    def groups(self, count: int) -> list[TicketRecord]:
        issued = self.apply(tickets.issue(self.ledger, "w", count))
        return [self.accept(record) for record in issued]

    def accept(self, record: TicketRecord, size: int = 100) -> TicketRecord:
        version = self.ledger.run.version
        facts = facts_of(size, 5, version, version)
        return self.apply(tickets.submit(self.ledger, record, facts))[0]

    def step(self, count: int, dropped: dict[str, str] | None = None) -> list[str]:
        taken = self.apply(leases.lease(self.ledger, self.fleet, "lease", count))
        run = self.ledger.run
        trained = [record.id for record in taken if record.id not in (dropped or {})]
        ack = LeaseAck(run.session, trained, dropped or {}, run.step + 1, run.version + 1)
        self.apply(leases.ack(self.ledger, self.fleet, ack, {}))
        return trained


def test_what_a_dead_worker_and_a_dead_learner_held_comes_back() -> None:
    bench = Bench(ticket_timeout_s=60.0, lease_timeout_s=120.0)
    bench.groups(1)
    bench.apply(leases.lease(bench.ledger, bench.fleet, "lease", 1))
    held = bench.apply(tickets.issue(bench.ledger, "dead", 1))[0]
    bench.apply(tickets.expire(bench.ledger, 59.0), 59.0)
    assert bench.ledger.outstanding == 2
    bench.apply(tickets.expire(bench.ledger, 61.0), 61.0)
    assert bench.ledger.get(held.id) is None
    again = bench.apply(tickets.issue(bench.ledger, "w", 1), 61.0)[0]
    assert (again.index, again.attempt) == (held.index, 1)
    bench.apply(tickets.expire(bench.ledger, 120.0), 120.0)
    assert [r.id for r in bench.ledger.tickets(TicketState.READY)] == ["0.0"]


def test_renewals_keep_tickets_and_leases() -> None:
    bench = Bench(ticket_timeout_s=60.0, lease_timeout_s=120.0)
    bench.groups(1)
    bench.apply(leases.lease(bench.ledger, bench.fleet, "lease", 1))
    held = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
    bench.ledger.renew_ticket(held.id, 59.0)
    bench.ledger.renew_lease("lease", 100.0)
    assert tickets.expire(bench.ledger, 118.0) == Decision()
    assert bench.ledger.next_deadline(118.0) == 119.0


def test_no_evaluation_that_is_requested_later_can_be_due_before_the_queue_looks_again() -> None:
    """One of two seconds ended a minute late, with the tickets' next deadline."""
    ledger = Ledger(config(eval={"every": 1, "timeout_s": 2.0}), StoreContents(), 0.0)
    assert ledger.next_deadline(100.0) == 102.0


def test_a_row_is_given_up_after_its_attempts_and_counted() -> None:
    bench = Bench(ticket_attempts=2)
    for attempt in range(2):
        record = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
        assert record.id == f"0.{attempt}"
        bench.apply(tickets.fail(bench.ledger, record, "failed:judge", retryable=True))
    assert bench.ledger.drops == {"failed:judge": 1}
    assert bench.apply(tickets.issue(bench.ledger, "w", 1))[0].id == "1.0"


def test_i9_a_ticket_that_a_worker_gives_back_as_it_ends_costs_its_row_no_attempt() -> None:
    bench = Bench(ticket_attempts=1)
    for attempt in range(5):
        record = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
        assert (record.id, record.failures) == (f"0.{attempt}", 0)
        bench.apply(tickets.fail(bench.ledger, record, "failed:worker_stopped", retryable=True))
    assert not bench.ledger.drops


def test_a_failure_that_would_repeat_ends_its_row_at_once() -> None:
    bench = Bench()
    record = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
    bench.apply(tickets.fail(bench.ledger, record, "failed:bad_row", retryable=False))
    assert bench.ledger.drops == {"failed:bad_row": 1}
    assert not bench.ledger.to_reissue


def test_a_ticket_says_which_step_the_learner_has_made() -> None:
    bench = Bench()
    bench.groups(1)
    bench.step(1)
    record = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
    assert tickets.message(bench.ledger, record).step == 1


def test_a_resume_does_not_count_as_a_failure_of_the_row() -> None:
    bench = Bench(ticket_attempts=1, max_staleness=0)
    bench.groups(1)
    bench.step(1)
    bench.begin(0, resume=True)
    record = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
    assert (record.id, record.failures) == ("0.1", 0)


def test_failed_rows_are_issued_before_new_ones() -> None:
    bench = Bench()
    records = bench.apply(tickets.issue(bench.ledger, "w", 3))
    for record in (records[2], records[0]):
        bench.apply(tickets.fail(bench.ledger, record, "failed:x", retryable=True))
    assert [r.id for r in tickets.issue(bench.ledger, "w", 3).tickets] == ["0.1", "2.1", "3.0"]


def test_every_ticket_carries_the_runs_seed_so_that_workers_agree_on_the_order_of_rows() -> None:
    bench = Bench()
    records = tickets.issue(bench.ledger, "w", 3).tickets
    assert {tickets.message(bench.ledger, record).seed for record in records} == {bench.ledger.config.run.seed}


def test_dropping_a_whole_batch_frees_its_permits() -> None:
    bench = Bench()
    groups = bench.groups(4)
    bench.apply(leases.lease(bench.ledger, bench.fleet, "lease", 4))
    drops = {record.id: "zero_variance" for record in groups}
    bench.apply(leases.ack(bench.ledger, bench.fleet, LeaseAck(bench.ledger.run.session, dropped=drops), {}))
    assert bench.ledger.outstanding == bench.ledger.bytes == 0
    assert bench.ledger.drops == {"zero_variance": 4}


def test_resume_brings_back_what_the_checkpoint_lacks() -> None:
    """Steps 1 to 3 train one group each, a checkpoint holds step 1: with K = 2, at version 4, step 3's is young."""
    bench = Bench()
    for _ in range(3):
        bench.groups(1)
        bench.step(1)
    bench.apply(leases.checkpointed(bench.ledger, 1, None))
    bench.begin(1, resume=True)
    assert (bench.ledger.run.version, bench.ledger.run.step) == (4, 1)
    assert [r.id for r in bench.ledger.tickets(TicketState.READY)] == ["2.0"]
    assert list(bench.ledger.to_reissue) == [1]
    assert bench.ledger.trained == 1


@pytest.mark.parametrize("where", ["ready", "with its worker"])
def test_i1_a_row_that_a_resume_made_over_age_is_issued_again_and_once_only(where: str) -> None:
    """K = 0: the version after a resume is one above what the groups at hand were sampled by."""
    bench = Bench(max_staleness=0)
    (record,) = bench.apply(tickets.issue(bench.ledger, "w", 1))
    if where == "ready":
        bench.accept(record)
    bench.begin(0, resume=True)
    if where != "ready":
        bench.apply(tickets.submit(bench.ledger, record, facts_of(100, 5, 0, 0)))
    ack = LeaseAck(bench.ledger.run.session, dropped={"0.0": reasons.OVERAGE})
    (ended,) = bench.apply(leases.ack(bench.ledger, bench.fleet, ack, {}))
    assert (ended.state, ended.reason) == (TicketState.REISSUED, reasons.ROLLED_BACK)
    assert not leases.ack(bench.ledger, bench.fleet, ack, {ended.id: ended}), "a repeated ack changes something"
    (again,) = bench.groups(1)
    assert again.id == "0.1"
    bench.apply(leases.ack(bench.ledger, bench.fleet, msgspec.structs.replace(ack, dropped={"0.1": "overage"}), {}))
    assert bench.ledger.drops == {"overage": 1}
    assert bench.ledger.bytes == 0


@pytest.mark.parametrize("where", ["ready", "leased", "trained", "with its worker"])
def test_i2_what_weights_sampled_that_are_many_steps_ahead_of_a_resume_is_issued_again(where: str) -> None:
    """Four steps are given up, K = 2: by its version the newest group is one old, by its weights four steps."""
    bench = Bench()
    for _ in range(3):
        bench.groups(1)
        bench.step(1)
    (record,) = bench.apply(tickets.issue(bench.ledger, "w", 1))
    newest = facts_of(100, 5, 3, 3)
    if where != "with its worker":
        bench.apply(tickets.submit(bench.ledger, record, newest))
    if where in ("leased", "trained"):
        bench.apply(leases.lease(bench.ledger, bench.fleet, "l", 1))
    if where == "trained":
        bench.apply(leases.ack(bench.ledger, bench.fleet, LeaseAck(1, [record.id], step=4, version=4), {}))
    bench.begin(0, resume=True)
    if where == "with its worker":
        bench.apply(tickets.submit(bench.ledger, record, newest))
    assert bench.ledger.get(record.id) is None
    assert record.index in bench.ledger.to_reissue
    (later,) = bench.apply(tickets.issue(bench.ledger, "w", 1))
    version = bench.ledger.run.version
    (taken,) = bench.apply(tickets.submit(bench.ledger, later, facts_of(100, 5, version, version)))
    assert taken.state is TicketState.READY, "by the weights that continue"


def test_the_queue_knows_the_sessions_of_the_time_line_that_survives() -> None:
    bench = Bench()
    for _ in range(3):
        bench.groups(1)
        bench.step(1)
    bench.begin(2, resume=True)
    assert list(bench.ledger.run.sessions) == [SessionStart(0, 0), SessionStart(2, 4)]
    bench.groups(1)
    bench.step(1)
    for _ in range(2):
        bench.begin(2, resume=True)
    assert list(bench.ledger.run.sessions) == [SessionStart(0, 0), SessionStart(2, 7)]
    bench.begin(0, resume=True)
    assert list(bench.ledger.run.sessions) == [SessionStart(0, 8)]


def test_a_resume_from_before_the_newest_checkpoint_reissues_what_was_forgotten() -> None:
    store = MemoryStore()
    bench = Bench()
    bench.groups(1)
    bench.step(1)
    decision = leases.checkpointed(bench.ledger, 1, None)
    store.commit(Changes.of([decision], {}))
    bench.apply(decision)
    bench.apply(leases.begin(bench.ledger, BeginSession(0, 0, 10, resume=True), store.forgotten_after(0)))
    assert list(bench.ledger.to_reissue) == [0]
    assert bench.ledger.trained == 0


def test_i3_a_resume_brings_back_no_more_than_there_is_room_for() -> None:
    bench = Bench(capacity_groups=3)
    bench.groups(2)
    bench.step(2)
    bench.groups(2)
    bench.begin(0, resume=True)
    assert bench.ledger.outstanding == 3
    assert list(bench.ledger.to_reissue) == [1]


@pytest.mark.parametrize(
    ("reason", "step", "resume"),
    [("run_exists", 0, False), ("step_unknown", 5, True)],
)
def test_a_session_that_does_not_fit_the_run_is_refused(reason: str, step: int, resume: bool) -> None:
    bench = Bench()
    bench.groups(1)
    bench.step(1)
    with pytest.raises(Refusal) as refusal:
        bench.begin(step, resume)
    assert refusal.value.reason == reason


def test_a_learner_that_died_before_its_first_step_may_simply_start_again() -> None:
    bench = Bench()
    bench.groups(2)
    bench.apply(leases.lease(bench.ledger, bench.fleet, "lease", 2))
    bench.begin(0, resume=False)
    assert (bench.ledger.run.version, bench.ledger.run.session) == (0, 2)
    assert bench.ledger.count(TicketState.READY) == 2


@pytest.mark.parametrize(("checkpoint_version", "first"), [(30, 31), (37, 38), (0, 1)])
def test_a_resume_on_an_empty_store_goes_on_above_the_checkpoints_version(checkpoint_version: int, first: int) -> None:
    """The queue lost its store. Versions run ahead of steps where the run was resumed before."""
    ledger = Ledger(config(), StoreContents(), 0.0)
    run = leases.begin(ledger, BeginSession(30, checkpoint_version, 100, resume=True), []).run
    assert run is not None
    assert (run.version, run.step) == (first, 30)


@pytest.mark.parametrize(("step", "version"), [(0, 2**63 - 1), (2**63 - 1, 0), (0, 2**53)])
def test_attack_1_a_session_whose_next_number_no_store_holds_is_refused(step: int, version: int) -> None:
    with pytest.raises(Refusal) as refusal:
        leases.begin(Ledger(config(), StoreContents(), 0.0), BeginSession(step, version, 1000, resume=True), [])
    assert refusal.value.reason == reasons.OUT_OF_RANGE
    assert str(2**53 - 1) in refusal.value.message


@pytest.mark.parametrize(("checkpoint_version", "first"), [(1, 4), (3, 4), (7, 8)])
def test_a_resume_goes_on_above_every_version_so_far(checkpoint_version: int, first: int) -> None:
    """The queue knows version 3; the checkpoint of step 1 may be of an older one, or of a store before this one."""
    bench = Bench()
    for _ in range(3):
        bench.groups(1)
        bench.step(1)
    bench.apply(leases.begin(bench.ledger, BeginSession(1, checkpoint_version, 10, resume=True), []))
    assert (bench.ledger.run.version, bench.ledger.run.step) == (first, 1)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(0, 50),
)
def test_versions_never_go_back(sessions: list[tuple[int, int, int]], first_checkpoint: int) -> None:
    """A resume on an empty store; then steps and a resume from any step so far with any checkpoint's version, over and
    over."""
    bench = Bench()
    bench.ledger = Ledger(bench.config, StoreContents(), 0.0)
    bench.apply(leases.begin(bench.ledger, BeginSession(5, first_checkpoint, 100, resume=True), []))
    versions = [first_checkpoint, bench.ledger.run.version]
    for steps, back, checkpoint_version in sessions:
        for _ in range(steps):
            bench.groups(1)
            bench.step(1)
            versions.append(bench.ledger.run.version)
        step = max(0, bench.ledger.run.step - back)
        bench.apply(leases.begin(bench.ledger, BeginSession(step, checkpoint_version, 100, resume=True), []))
        versions.append(bench.ledger.run.version)
    assert versions == sorted(set(versions))


@pytest.mark.parametrize(
    ("reason", "ack"),
    [
        ("version_conflict", LeaseAck(1, ["0.0"], step=3, version=3)),
        ("version_conflict", LeaseAck(1, ["0.0"], step=2, version=1)),
        ("step_missing", LeaseAck(1, ["0.0"])),
        ("not_leased", LeaseAck(1, ["9.0"], step=2, version=2)),
        ("not_leased", LeaseAck(1, dropped={"9.0": reasons.OVERAGE})),
        ("not_leased", LeaseAck(1, ["1.0"], step=2, version=2)),
        ("not_leased", LeaseAck(1, ["2.0"], step=2, version=2)),
        ("not_leased", LeaseAck(1, dropped={"1.0": reasons.OVERAGE})),
        ("ack_ambiguous", LeaseAck(1, ["0.0", "0.0"], step=2, version=2)),
        ("ack_ambiguous", LeaseAck(1, ["0.0"], {"0.0": reasons.OVERAGE}, step=2, version=2)),
    ],
)
def test_i1_an_ack_that_cannot_be_true_changes_nothing(reason: str, ack: LeaseAck) -> None:
    """0.0 is leased, 1.0 trained at step 1, 2.0 still out, 9.0 never issued."""
    bench = Bench()
    records = bench.apply(tickets.issue(bench.ledger, "w", 3))
    bench.accept(records[1])
    bench.step(1)
    bench.accept(records[0])
    bench.apply(leases.lease(bench.ledger, bench.fleet, "lease", 1))
    with pytest.raises(Refusal) as refusal:
        leases.ack(bench.ledger, bench.fleet, ack, {})
    assert refusal.value.reason == reason


def test_one_step_may_take_several_acks() -> None:
    bench = Bench()
    bench.groups(2)
    for lease_id in ("a", "b"):
        group = bench.apply(leases.lease(bench.ledger, bench.fleet, lease_id, 1))[0]
        bench.apply(leases.ack(bench.ledger, bench.fleet, LeaseAck(1, [group.id], step=1, version=1), {}))
    assert (bench.ledger.run.version, bench.ledger.trained) == (1, 2)


def test_a_step_made_under_an_expired_lease_is_recorded() -> None:
    bench = Bench()
    group = bench.groups(1)[0]
    bench.apply(leases.lease(bench.ledger, bench.fleet, "lease", 1))
    bench.apply(tickets.expire(bench.ledger, 1e6))
    bench.apply(leases.ack(bench.ledger, bench.fleet, LeaseAck(1, [group.id], step=1, version=1), {}))
    assert bench.ledger.trained == 1


def test_oldest_versions_are_leased_first() -> None:
    bench = Bench()
    bench.groups(1)
    bench.step(1)
    bench.groups(2)
    lagging = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
    bench.apply(tickets.submit(bench.ledger, lagging, facts_of(100, 5, 0, 1)))
    assert [r.id for r in leases.lease(bench.ledger, bench.fleet, "lease", 2).tickets] == ["3.0", "1.0"]


def test_finish_ends_what_is_outstanding_and_more_steps_reopen_the_run() -> None:
    bench = Bench()
    bench.groups(3)
    bench.apply(tickets.issue(bench.ledger, "w", 1))
    bench.step(1)
    bench.apply(leases.finish(bench.ledger))
    assert bench.ledger.run.finished
    assert bench.ledger.outstanding == 0
    assert bench.ledger.drops == {"run_finished": 3}
    bench.apply(leases.begin(bench.ledger, BeginSession(1, 1, 1, resume=True), []))
    assert bench.ledger.run.finished
    bench.apply(leases.begin(bench.ledger, BeginSession(1, 1, 2, resume=True), []))
    assert not bench.ledger.run.finished


def test_a_leased_group_that_a_failed_proof_taints_is_revoked_and_a_step_already_made_stands() -> None:
    bench = Bench()
    bench.serve()
    bench.groups(3)
    leased = bench.apply(leases.lease(bench.ledger, bench.fleet, "l", 2))
    bench.apply(servers.put(bench.fleet, bench.ledger, Server(SERVER, "u", ServerState.QUARANTINED, 0), 0.0))
    ids = [record.id for record in leased]
    assert leases.revoked(bench.ledger, bench.fleet, "l", ids) == dict.fromkeys(ids, reasons.UNVERIFIED_SERVER)
    assert bench.ledger.drops == {reasons.UNVERIFIED_SERVER: 1}, "the ready one"
    ack = LeaseAck(1, [ids[0]], {ids[1]: reasons.UNVERIFIED_SERVER}, step=1, version=1)
    made = bench.apply(leases.ack(bench.ledger, bench.fleet, ack, {}))
    assert [(r.state, r.reason) for r in made] == [
        (TicketState.TRAINED, reasons.UNVERIFIED_SERVER),
        (TicketState.DROPPED, reasons.UNVERIFIED_SERVER),
    ]


@pytest.mark.parametrize("way_back", ["release", "lapse", "resume", "rollback"])
def test_a_tainted_group_is_not_leased_again_however_it_came_back(way_back: str) -> None:
    bench = Bench()
    bench.serve()
    bench.groups(1)
    leased = bench.apply(leases.lease(bench.ledger, bench.fleet, "l", 1))
    if way_back == "rollback":
        bench.apply(leases.ack(bench.ledger, bench.fleet, LeaseAck(1, [leased[0].id], step=1, version=1), {}))
    bench.apply(servers.put(bench.fleet, bench.ledger, Server(SERVER, "u", ServerState.QUARANTINED, 0), 0.0))
    if way_back == "release":
        bench.apply(leases.release(bench.ledger, "l"))
    elif way_back == "lapse":
        bench.apply(tickets.expire(bench.ledger, 1e6))
    else:
        bench.begin(0, resume=True)
    assert bench.ledger.count(TicketState.READY) == 1
    (record,) = bench.apply(leases.lease(bench.ledger, bench.fleet, "m", 4))
    assert (record.state, record.reason) == (TicketState.DROPPED, reasons.UNVERIFIED_SERVER)


def test_trained_payloads_are_counted_and_give_way_without_holding_anybody_up() -> None:
    """A learner that never makes a checkpoint, in a queue with room for four groups: twenty steps of two."""
    bench = Bench(capacity_bytes=1024, max_group_bytes=1024)
    for step in range(1, 21):
        for record in bench.apply(tickets.issue(bench.ledger, "w", 2)):
            bench.accept(record, size=256)
        bench.step(2)
        assert (bench.ledger.bytes, bench.ledger.kept_bytes) == (0, min(1024, 512 * step))
    kept = {record.step for record in bench.ledger.tickets(TicketState.TRAINED)}
    assert kept == {19, 20}, "the oldest go first"
    assert bench.ledger.trained == 40


def test_old_tickets_become_sums_and_a_resume_from_before_is_refused_with_the_remedy() -> None:
    bench = Bench(keep_checkpoints=2)
    for step in range(1, 5):
        bench.groups(1)
        bench.step(1)
        bench.apply(leases.checkpointed(bench.ledger, step, None, indices_kept=0))
    run = bench.ledger.run
    assert (run.checkpoints, run.pruned_step, run.pruned_below) == ((3, 4), 3, 3)
    assert bench.ledger.summary().trained == bench.ledger.summary().issued == 4
    assert bench.ledger.was_pruned("2.0")
    assert not any(bench.ledger.was_pruned(other) for other in ("3.0", "", "x", "-1.0", "9" * 5000))
    with pytest.raises(Refusal, match="resume from one of those") as refusal:
        bench.begin(2, resume=True)
    assert refusal.value.reason == reasons.STEP_UNKNOWN
    with pytest.raises(Refusal) as late:
        tickets.check_accepted(bench.ledger, "2.0", None)
    assert late.value.reason == reasons.TICKET_ENDED
    ack = LeaseAck(1, dropped={"2.0": reasons.OVERAGE})
    assert not leases.ack(bench.ledger, bench.fleet, ack, {}), "a repeat"


def test_the_newest_indices_stay_one_by_one_and_so_does_what_is_out() -> None:
    bench = Bench(keep_checkpoints=1)
    first, straggler = bench.apply(tickets.issue(bench.ledger, "w", 2))
    bench.apply(tickets.fail(bench.ledger, first, "row", retryable=False))
    for step in range(1, 9):
        bench.groups(1)
        bench.step(1)
        bench.apply(leases.checkpointed(bench.ledger, step, None, indices_kept=4))
    assert bench.ledger.run.pruned_below == straggler.index
    bench.apply(tickets.fail(bench.ledger, straggler, "row", retryable=False))
    bench.apply(leases.checkpointed(bench.ledger, 8, None, indices_kept=4))
    assert bench.ledger.run.pruned_below == bench.ledger.next_index - 4


def test_reasons_that_clients_make_up_are_few_and_short() -> None:
    bench = Bench(ticket_attempts=1)
    groups = bench.groups(100)
    out = bench.apply(tickets.issue(bench.ledger, "w", 200))
    bench.apply(leases.lease(bench.ledger, bench.fleet, "l", 100))
    drops = {record.id: f"{'x' * 5000}{i}" if i == 0 else f"made-up-{i}" for i, record in enumerate(groups)}
    bench.apply(leases.ack(bench.ledger, bench.fleet, LeaseAck(1, dropped=drops), {}))
    for i, record in enumerate(out):
        bench.apply(tickets.fail(bench.ledger, record, reasons.failed(f"mine-{i}:{reasons.OVERAGE}"), retryable=True))
    assert len(bench.ledger.drops) == 65
    assert bench.ledger.drops[reasons.OTHER] == 300 - 64
    assert max(map(len, bench.ledger.drops)) == 80
    (late,) = bench.groups(1)
    bench.apply(leases.lease(bench.ledger, bench.fleet, "l", 1))
    bench.apply(leases.ack(bench.ledger, bench.fleet, LeaseAck(1, dropped={late.id: reasons.OVERAGE}), {}))
    assert bench.ledger.drops[reasons.OVERAGE] == 1, "ours are never lumped together"


def test_a_ticket_that_is_renewed_for_ever_is_issued_again() -> None:
    bench = Bench(ticket_timeout_s=60.0, ticket_max_age_s=2000.0)
    held = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
    for now in range(0, 2000, 50):
        bench.ledger.renew_ticket(held.id, float(now))
        assert not tickets.expire(bench.ledger, float(now))
    assert bench.ledger.next_deadline(1990.0) == 2000.0
    (ended,) = bench.apply(tickets.expire(bench.ledger, 2000.0), 2000.0)
    assert (ended.state, ended.reason) == (TicketState.REISSUED, reasons.OUTLIVED)
    assert bench.ledger.outstanding == 0


def test_a_tickets_greatest_age_follows_the_episodes_unless_it_is_given() -> None:
    plain = config(worker={"episode_timeout_s": 100.0, "reward_timeout_s": 20.0, "environment_timeout_s": 30.0})
    assert plain.ticket_max_age_s == 300.0
    with pytest.raises(
        ValueError, match=r"the longest episodes would lose their ticket .* raise queue\.ticket_max_age_s"
    ):
        config(queue={"ticket_max_age_s": 10.0})


def test_a_lapsed_lease_that_is_leased_again_holds_what_the_learner_has() -> None:
    """0.0 and 1.0 are at the learner when the lease lapses; 1.0 goes to another lease in the meantime."""
    bench = Bench()
    bench.groups(3)
    bench.apply(leases.lease(bench.ledger, bench.fleet, "l", 2))
    bench.apply(tickets.expire(bench.ledger, 1e6))
    with pytest.raises(Refusal, match="drop what is left of it"):
        leases.check_renewal(bench.ledger, "l")
    bench.apply(leases.lease(bench.ledger, bench.fleet, "other", 0, have=["1.0"]))
    bench.apply(leases.lease(bench.ledger, bench.fleet, "l", 1, have=["0.0", "1.0"]))
    assert {r.id for r in bench.ledger.leased("l")} == {"0.0", "2.0"}, "what it has, and one more"
    assert leases.revoked(bench.ledger, bench.fleet, "l", ["0.0", "1.0"]) == {"1.0": reasons.LEASE_LAPSED}
    leases.check_renewal(bench.ledger, "l")


def test_finish_counts_the_rows_that_wait_to_be_issued_again() -> None:
    bench = Bench()
    record = bench.apply(tickets.issue(bench.ledger, "w", 1))[0]
    bench.apply(tickets.fail(bench.ledger, record, "failed:judge", retryable=True))
    bench.apply(leases.finish(bench.ledger))
    counts = bench.ledger.summary()
    assert (counts.issued, counts.dropped, counts.reissued) == (1, 1, 0)
    assert bench.ledger.drops == {reasons.RUN_FINISHED: 1}
    assert not bench.ledger.to_reissue
