"""A run's week on the real store: its file, a restart and the memory of the process stay small."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from slipstream.protocol.messages import BeginSession, LeaseAck, Server, ServerState
from slipstream.rollout_queue.ledger import evaluations, leases, servers, tickets
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import Decision, GroupFacts, SampledBy, TicketRecord, TicketState
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit import config
from tests.kit.messages import SERVER

BATCH, STEPS_PER_CHECKPOINT, SECONDS_PER_STEP, PAYLOAD_BYTES = 256, 10, 150.0, 200
# One batch is always ready beyond the one in training.
CONFIG = config(
    queue={"max_staleness": 2, "ticket_timeout_s": 100.0}, learner={"groups_per_step": BATCH, "keep_checkpoints": 2}
)


class Week:
    """A queue on its store, with workers of whom some fail or fall silent, and a learner that saves checkpoints."""

    def __init__(self, path: Path, indices_kept: int) -> None:
        self.indices_kept = indices_kept
        self.store = SqliteStore(path)
        assert self.store.acquire() is None
        contents = self.store.load()
        self.now, self.pruned_below = 0.0, contents.run.pruned_below
        self.ledger, self.fleet = Ledger(CONFIG, contents, self.now), ServerRegistry(contents.servers)

    def commit(self, *decisions: Decision, payloads: Mapping[str, bytes] | None = None) -> None:
        """Store decisions that are applied already, in one commit."""
        checked = {name: Payload.of(body) for name, body in (payloads or {}).items()}
        changes = Changes.of(decisions, checked, self.pruned_below)
        self.store.commit(changes)
        self.pruned_below = changes.prune_below or self.pruned_below

    def apply(self, decision: Decision) -> Decision:
        decision = evaluations.with_ends(self.ledger, self.fleet, decision, self.now)
        self.ledger.apply(decision, self.now)
        for server in decision.servers:
            self.fleet.apply(server)
        return decision

    def begin(self) -> None:
        self.commit(self.apply(leases.begin(self.ledger, BeginSession(0, 0, 10**9, resume=False), [])))
        for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
            self.publish(state)

    def publish(self, state: ServerState) -> None:
        server = Server(SERVER, "http://s", state, self.ledger.run.version)
        self.commit(self.apply(servers.put(self.fleet, self.ledger, server, self.now)))

    def end_ticket(self, record: TicketRecord, payloads: dict[str, bytes]) -> list[Decision]:
        """Submit a ticket's group. Some tickets fail, and of others nothing is heard."""
        if record.serial % 50 == 0:
            return [self.apply(tickets.fail(self.ledger, record, "failed:judge", retryable=True))]
        if record.serial % 51 == 0:
            return []
        version = record.version
        facts = GroupFacts(PAYLOAD_BYTES, 100, version, (SampledBy(SERVER, version, version),))
        self.fleet.check_group(facts, record.serial)
        payloads[record.id] = record.id.encode().ljust(PAYLOAD_BYTES, b".")
        return [self.apply(tickets.submit(self.ledger, record, facts))]

    def step(self) -> None:
        """Make a step, and what its groups take."""
        self.now += SECONDS_PER_STEP
        ledger, payloads = self.ledger, dict[str, bytes]()
        late = self.apply(tickets.expire(ledger, self.now))
        wanted = 3 * BATCH - ledger.outstanding
        issued = self.apply(tickets.issue(ledger, f"w{ledger.issued % 7}", wanted))
        self.commit(late, issued)
        ended = [decision for record in issued.tickets for decision in self.end_ticket(record, payloads)]
        self.commit(*ended, payloads=payloads)
        run = ledger.run
        leased = self.apply(leases.lease(ledger, self.fleet, f"l{run.step}", BATCH))
        self.commit(leased)
        found = self.store.payloads([record.id for record in leased.tickets])
        assert all(found[record.id].body.startswith(record.id.encode()) for record in leased.tickets)
        over_age = {r.id for r in leased.tickets if run.version - r.group.oldest_version > CONFIG.queue.max_staleness}
        trained = [record.id for record in leased.tickets if record.id not in over_age]
        ack = LeaseAck(run.session, trained, dict.fromkeys(over_age, "overage"), run.step + 1, run.version + 1)
        self.commit(self.apply(leases.ack(ledger, self.fleet, ack, {})))
        self.publish(ServerState.SERVING)
        if ledger.run.step % STEPS_PER_CHECKPOINT == 0:
            oldest = leases.kept_checkpoints(ledger, ledger.run.step)[0]
            first = self.store.first_forgotten_after(oldest)
            self.commit(self.apply(leases.checkpointed(ledger, ledger.run.step, first, self.indices_kept)))


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize(
    ("count", "indices_kept"),
    [(60_000, 10_000), pytest.param(1_000_000, leases.INDICES_KEPT, marks=pytest.mark.wide)],
)
def test_a_weeks_tickets_leave_store_restart_and_memory_small(tmp_path: Path, count: int, indices_kept: int) -> None:
    path = tmp_path / "queue.db"
    week = Week(path, indices_kept)
    week.begin()
    resident: list[int] = []
    while week.ledger.issued < count:
        week.step()
        if week.ledger.issued >= (len(resident) + 1) * count // 10:
            resident.append(resident_bytes())
    half = len(resident) // 2
    assert max(resident[half:]) <= 1.1 * resident[half - 1], f"resident bytes at each tenth: {resident}"
    run, summary, drops = week.ledger.run, week.ledger.summary(), week.ledger.drops
    assert summary.issued == summary.trained + summary.dropped + summary.reissued + summary.outstanding >= count
    assert run.pruned_below >= week.ledger.next_index - indices_kept - STEPS_PER_CHECKPOINT * 4 * BATCH
    week.store.close()
    assert sum(file.stat().st_size for file in path.parent.iterdir()) < 300e6
    began = time.monotonic()
    again = Week(path, indices_kept)
    assert time.monotonic() - began < 5.0
    assert (again.ledger.run, again.ledger.summary(), again.ledger.drops) == (run, summary, drops)
    for state in TicketState:
        assert again.ledger.counts[state] == week.ledger.counts[state]
    again.store.close()
