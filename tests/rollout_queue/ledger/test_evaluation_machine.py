"""Evaluations under any order of events, crashes and resumes included, on the real store: each comes to an end, every
row is counted once, and the sums of the training know nothing of them (I1)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from slipstream.protocol import reasons
from slipstream.protocol.messages import BeginSession, Fingerprint, Server, ServerState
from slipstream.protocol.status import Evaluation, EvaluationRequest
from slipstream.rollout_queue.ledger import evaluations, leases, servers, tickets
from slipstream.rollout_queue.ledger.evaluations import Asking
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.open_evaluations import Evaluations, OpenEvaluation
from slipstream.rollout_queue.ledger.records import Decision, GroupFacts, Refusal, SampledBy, TicketRecord, TicketState
from slipstream.rollout_queue.ledger.server_registry import lost
from tests.kit import config, group
from tests.kit.messages import SERVER
from tests.kit.queue_machine import SabotagedQueue

ATTEMPTS, ROWS, MOST, TIMEOUT_S = 2, 5, 6, 500.0
CONFIG = config(queue={"ticket_attempts": ATTEMPTS, "ticket_max_age_s": 90.0}, worker={"episode_timeout_s": 60.0})
SAID = Fingerprint("1", "t", "c", {}, rows=9, eval_rows=ROWS)


class EvaluationMachine(SabotagedQueue):
    """Workers, a learner, weight sync and a saboteur take turns at the evaluations of one queue."""

    run_config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[int, Evaluation] = {}
        self.ids: set[str] = set()
        self.accepted: set[tuple[int, int]] = set()

    def restart_queue(self) -> None:
        super().restart_queue()
        self.asked_at = {of.record.number: self.now for of in self.evaluations.open}

    def commit(self, decision: Decision, payloads: Mapping[str, bytes] | None = None) -> None:
        assert not decision.trains, "I1: no ticket of the training is touched"
        decision = evaluations.with_ends(self.ledger, self.fleet, decision, self.now)
        again = (ticket for ticket in decision.tickets if ticket.state is TicketState.REISSUED)
        self.accepted -= {(ticket.evaluation, ticket.index) for ticket in again}
        for record in decision.evaluations:
            self.asked_at.setdefault(record.number, self.now)
            if record.result is not None:
                assert record.number not in self.results, "an evaluation ends once"
                self.results[record.number] = record.result
        super().commit(decision, payloads)

    @property
    def evaluations(self) -> Evaluations:
        return self.ledger.evaluations

    @property
    def out(self) -> list[TicketRecord]:
        return self.evaluations.tickets(TicketState.ISSUED)

    @rule(seconds=st.sampled_from([1.0, 45.0, 61.0, 260.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        over = evaluations.expire(self.ledger, self.fleet, self.now, self.now)
        self.commit(msgspec.structs.replace(tickets.expire(self.ledger, self.now), evaluations=over))
        late = [self.now - self.asked_at[of.record.number] for of in self.evaluations.open]
        assert max(late, default=0.0) < TIMEOUT_S, "an evaluation that never ends"

    # Weight sync and the learner.

    @initialize(knows_rows=st.booleans())
    def everything_starts(self, knows_rows: bool) -> None:
        self.put_server(ServerState.JOINING)
        self.publish()
        self.commit(leases.begin(self.ledger, BeginSession(0, 0, 9, resume=False), []))
        if knows_rows:
            self.worker_registers()

    @rule()
    def proof_fails(self) -> None:
        self.put_server(ServerState.SYNCING)
        wanted = Server(SERVER, "http://s", ServerState.QUARANTINED, self.ledger.run.version)
        decision = servers.put(self.fleet, self.ledger, wanted, 0.0)
        assert decision.servers
        self.commit(decision)

    @precondition(lambda self: not self.ledger.run.finished)
    @rule()
    def step(self) -> None:
        run = self.ledger.run
        self.commit(Decision(run=msgspec.structs.replace(run, step=run.step + 1, version=run.version + 1)))

    @precondition(lambda self: not self.ledger.run.finished)
    @rule(group_size=st.integers(1, 8), wanted=st.sampled_from([None, 1, 3, 99]), repeat=st.booleans())
    def ask(self, group_size: int, wanted: int | None, repeat: bool) -> None:
        run = self.ledger.run
        request = EvaluationRequest(run.session, run.step, run.version, wanted, group_size, None, TIMEOUT_S)
        had = any(record.step == run.step for record in self.evaluations.records)
        decision = evaluations.ask(self.ledger, request, self.now)
        assert bool(decision) != had, "a step has one evaluation"
        self.commit(decision)
        if repeat:
            assert not evaluations.ask(self.ledger, request, self.now)

    @rule(back=st.integers(0, 2))
    def learner_killed_and_resumed(self, back: int) -> None:
        run = self.ledger.run
        step = max(0, run.step - back)
        message = BeginSession(step, run.version, 9, resume=True)
        gone = evaluations.begin(self.ledger, message)
        begun = leases.begin(self.ledger, message, [])
        assert begun.run is not None
        unproven = servers.distrust_unproven(self.fleet, self.ledger, begun.run.version)
        self.commit(msgspec.structs.replace(begun, tickets=unproven.tickets, servers=unproven.servers, forgotten=gone))
        assert all(record.step <= step for record in self.evaluations.records)
        self.accepted = {pair for pair in self.accepted if pair[0] not in gone}

    @precondition(lambda self: self.ledger.run.step > 4)
    @rule()
    def finish(self) -> None:
        left = evaluations.finish(self.ledger, self.fleet, self.now)
        self.commit(msgspec.structs.replace(leases.finish(self.ledger), evaluations=left))
        assert not self.evaluations.open

    # Workers.

    @rule()
    def worker_registers(self) -> None:
        run = self.ledger.run
        self.commit(Decision(run=msgspec.structs.replace(run, data=SAID, data_session=run.session)))

    @rule(worker=st.sampled_from(["a", "b"]), episodes=st.integers(1, 12))
    def ask_for_tickets(self, worker: str, episodes: int) -> None:
        served = self.fleet.served_version
        issued = evaluations.issue(self.ledger, served, Asking(worker, episodes, MOST))
        for ticket in issued.tickets:
            assert ticket.id not in self.ids, "a ticket that is issued twice"
            record = self.evaluations.record_of(ticket)
            assert record is not None
            assert served is not None
            assert served >= record.version, "weights older than were asked for"
            assert (ticket.evaluation, ticket.index) not in self.accepted, "a row that is done is issued again"
        self.ids |= {ticket.id for ticket in issued.tickets}
        self.commit(issued)
        held = self.ledger.held_by(worker)
        assert evaluations.episodes_of(self.ledger, held) <= MOST or len(held) == 1

    @rule(data=st.data(), rewards=st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=1, max_size=3))
    def submit(self, data: st.DataObject, rewards: list[float]) -> None:
        if not self.out:
            return
        self.hand_in(data.draw(st.sampled_from(self.out)), rewards)

    def hand_in(self, ticket: TicketRecord, rewards: list[float]) -> None:
        version = self.ledger.run.version
        facts = GroupFacts(1, 1, version, (SampledBy(SERVER, version, version),))
        try:
            self.fleet.check_group(facts, ticket.serial)
        except Refusal as refusal:
            self.commit(tickets.fail(self.ledger, ticket, reasons.rejected(refusal.reason), retryable=True))
            return
        self.accepted.add((ticket.evaluation, ticket.index))
        self.commit(evaluations.accept(ticket, group(ticket.id, rewards=rewards), facts))

    @rule(data=st.data(), retryable=st.booleans())
    def give_back(self, data: st.DataObject, retryable: bool) -> None:
        if self.out:
            ticket = data.draw(st.sampled_from(self.out))
            self.commit(tickets.fail(self.ledger, ticket, "failed:row", retryable))

    @precondition(lambda self: not self.ledger.run.finished)
    @rule(group_size=st.sampled_from([1, 2, 8]), published=st.booleans(), left=st.integers(0, 2))
    def all_goes_well(self, group_size: int, published: bool, left: int) -> None:
        """The usual course up to `left` rows of the end, so that what comes after it is met often."""
        self.worker_registers()
        self.step()
        if published:
            self.publish()
        self.ask(group_size, 3, repeat=False)
        for worker in ("a", "b"):
            self.ask_for_tickets(worker, 12)
            for ticket in self.out[left:]:
                self.hand_in(ticket, [1.0])

    @precondition(lambda self: not self.ledger.run.finished)
    @rule()
    def learner_is_killed_before_it_proves_what_sampled_rows(self) -> None:
        self.all_goes_well(group_size=1, published=True, left=2)
        self.step()
        for ticket in self.out:
            self.hand_in(ticket, [1.0])
        self.learner_killed_and_resumed(0)

    @rule()
    def a_row_never_works(self) -> None:
        """It is given back as often as it is issued."""
        first = next(iter(self.out), None)
        for _ in range(ATTEMPTS + 1):
            for ticket in self.out:
                if first is not None and (ticket.evaluation, ticket.index) == (first.evaluation, first.index):
                    self.commit(tickets.fail(self.ledger, ticket, "failed:row", retryable=True))
            self.ask_for_tickets("a", 1)

    @rule(worker=st.sampled_from(["a", "b"]))
    def worker_is_refused(self, worker: str) -> None:
        self.commit(tickets.give_back(self.ledger, worker))
        assert not self.ledger.held_by(worker)

    @rule(worker=st.sampled_from(["a", "b"]))
    def worker_asks_for_what_it_lost(self, worker: str) -> None:
        held = {ticket.id for ticket in self.ledger.held_by(worker)}
        assert {ticket.id for ticket in tickets.undelivered(self.ledger, worker, [])} == held
        assert not tickets.undelivered(self.ledger, worker, sorted(held))

    # What must always hold.

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        for of in self.evaluations.open:
            assert sorted(of.tickets) == list(range(of.record.next_row))
            assert of.record.rows is None or of.record.next_row <= of.record.rows
            again = {row for row, ticket in of.tickets.items() if ticket.state is TicketState.REISSUED}
            assert again == set(of.to_reissue)
            assert all(ticket.failures <= ATTEMPTS for ticket in of.tickets.values())
            ends = (TicketState.EVALUATED, TicketState.DROPPED)
            ended = sum(ticket.state in ends for ticket in of.tickets.values())
            assert of.tally.ended == ended
            over = of.record.rows is not None and ended == of.record.rows
            assert not over or self.waits_for_proof(of), "all rows have ended, and it has not"

    @invariant()
    def i5_no_row_is_done_by_weights_that_failed_or_whose_proof_cannot_come(self) -> None:
        for ticket in self.evaluations.tickets(TicketState.EVALUATED):
            assert self.fleet.distrusted(ticket.group, ticket.serial) is None
            record = self.fleet.record(SERVER)
            assert record is not None
            assert not lost(record, ticket.group)

    def waits_for_proof(self, of: OpenEvaluation) -> bool:
        """I5: whether a row was sampled between a swap and its proof."""
        done = (ticket for ticket in of.tickets.values() if ticket.state is TicketState.EVALUATED)
        sampled = [by.newest for ticket in done for by in ticket.group.servers]
        record = next(record for record in self.fleet.records if record.server.name == SERVER)
        return record.proven is None or any(newest > record.proven for newest in sampled)

    @invariant()
    def what_ended_counts_every_row(self) -> None:
        for evaluation in self.results.values():
            assert evaluation.ended is not None
            assert evaluation.done + evaluation.failed == (evaluation.rows or 0)
            assert sum(evaluation.failures.values()) == evaluation.failed
            assert set(evaluation.failures) <= {
                "failed:row",
                reasons.EXPIRED,
                reasons.OUTLIVED,
                reasons.DEADLINE,
                reasons.RUN_FINISHED,
                reasons.UNVERIFIED_SERVER,
                reasons.rejected(reasons.UNVERIFIED_SERVER),
            }
            assert (evaluation.reward is None) == (evaluation.done == 0)

    @invariant()
    def memory_is_what_a_restart_would_load(self) -> None:
        restarted = Ledger(CONFIG, self.store.load(), self.now)
        for worker in ("a", "b"):
            held = self.ledger.held_by(worker)
            assert {t.id: t for t in held} == {t.id: t for t in restarted.held_by(worker)}
            assert [t.evaluation for t in held] == sorted(t.evaluation or 0 for t in held)
        fresh = restarted.evaluations
        assert [of.record for of in fresh.open] == [of.record for of in self.evaluations.open]
        assert [of.tickets for of in fresh.open] == [of.tickets for of in self.evaluations.open]
        assert fresh.ended == self.evaluations.ended

    @invariant()
    def i1_the_sums_of_the_training_know_nothing_of_it(self) -> None:
        assert self.ledger.issued == 0
        assert self.ledger.bytes == 0


TestEvaluations = EvaluationMachine.TestCase
TestEvaluations.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
