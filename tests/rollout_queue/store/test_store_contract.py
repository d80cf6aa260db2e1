"""What `store/base.py` promises, over every store that `queue.store` can name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.sections.processes import STORES
from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.status import Evaluation
from slipstream.rollout_queue import store as stores
from slipstream.rollout_queue.ledger.records import (
    HOLDS_PAYLOAD,
    Decision,
    Distrust,
    EvalRecord,
    GroupFacts,
    RowRecord,
    RowResult,
    RunState,
    SampledBy,
    ServerRecord,
    StoreContents,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.store.base import LedgerRow, Store, StoreError
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit.stores import active, with_store

# Each store, and whether it keeps what was committed when it is closed and opened again.
VARIANTS = {
    "sqlite": True,
    ":memory:": False,
    "postgresql": True,
}
FACTS = GroupFacts(
    bytes=300, tokens=7, oldest_version=2, servers=(SampledBy("vllm-0", 2, 3), SampledBy("vllm-1", 3, 4))
)


def test_every_store_of_the_schema_is_registered_and_tested() -> None:
    assert set(stores.STORES) == set(stores.STORE_READERS) == set(STORES) == set(VARIANTS)


@pytest.fixture(params=VARIANTS)
def run_config(request: pytest.FixtureRequest, tmp_path: Path) -> RunConfig:
    return with_store(request.param, tmp_path)


@pytest.fixture
def store(run_config: RunConfig) -> Iterator[Store]:
    store = active(run_config)
    yield store
    store.close()


def ticket(index: int, state: TicketState = TicketState.ISSUED, attempt: int = 0, **fields: Any) -> TicketRecord:
    group = FACTS if state in HOLDS_PAYLOAD or state is TicketState.FORGOTTEN else GroupFacts()
    values = {"index": index, "attempt": attempt, "serial": 10 * index + attempt, "worker_id": "w", "version": 4}
    return TicketRecord(**{**values, "state": state, "group": group, **fields})


def commit(store: Store, *tickets: TicketRecord, **payloads: bytes) -> None:
    bodies = {name.replace("_", "."): Payload.of(body) for name, body in payloads.items()}
    store.commit(Changes.of([Decision(tickets)], bodies))


def decide(store: Store, *decisions: Decision) -> None:
    store.commit(Changes.of(decisions, {}))


def test_a_new_store_is_empty(store: Store) -> None:
    assert store.load() == StoreContents()
    assert store.payloads(["0.0"]) == {}
    assert store.records(["0.0"]) == {}
    assert store.forgotten_after(0) == []


def test_what_is_stored_is_read_beside_the_queue(store: Store, run_config: RunConfig) -> None:
    decide(store, Decision((ticket(4),), run=RunState(version=9)))
    reader = stores.open_for_reading(run_config)
    if not VARIANTS[run_config.queue.store_kind]:
        assert (reader.exists(), reader.run_state()) == (False, RunState())
        return
    assert reader.exists()
    assert reader.run_state() == RunState(version=9)
    assert reader.read_ledger() == [LedgerRow("4.0", 4, TicketState.ISSUED, None, None, None)]


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_run_that_has_stored_nothing_has_no_ledger(kind: str, tmp_path: Path) -> None:
    reader = stores.open_for_reading(with_store(kind, tmp_path))
    assert (reader.exists(), reader.run_state()) == (False, RunState())
    with pytest.raises(ConfigError, match=r"there is no ledger; has the run's queue been started|keeps no ledger"):
        reader.read_ledger()


def test_every_field_of_a_record_comes_back(store: Store) -> None:
    record = TicketRecord(
        index=3,
        attempt=2,
        serial=9,
        worker_id="w",
        version=4,
        state=TicketState.TRAINED,
        failures=1,
        reason="expired",
        lease_id="l",
        group=FACTS,
        arrival_version=5,
        step=6,
        trained_version=7,
        row=0,
    )
    unset = TicketRecord(index=0, attempt=0, serial=0, worker_id="", version=0)
    assert all(
        getattr(record, name) != getattr(unset, name)
        for name in TicketRecord.__struct_fields__
        if name not in ("state", "evaluation", "result")
    )
    commit(store, record, unset)
    assert store.records(["3.2", "0.0", "9.9"]) == {"3.2": record, "0.0": unset}
    assert store.load().live == [unset, record]


def test_run_and_servers_come_back(store: Store) -> None:
    run = RunState(
        version=5,
        step=4,
        total_steps=9,
        session=2,
        checkpoint_step=3,
        checkpoints=(2, 3),
        finished=True,
        staleness_max=1,
    )
    server = ServerRecord(
        Server("a", "http://a", ServerState.QUARANTINED, 4, "probe", 7.5), True, (Distrust(4), Distrust(2, 8, 3))
    )
    decide(store, Decision(run=RunState(session=1), servers=(ServerRecord(Server("a", "http://old")),)))
    decide(store, Decision(run=run, servers=(server,)))
    decide(store, Decision(servers=(ServerRecord(Server("b", "http://b")),)))
    contents = store.load()
    assert contents.run == run
    assert contents.servers == [server, ServerRecord(Server("b", "http://b"))]


def test_load_gives_what_the_queue_keeps_in_memory(store: Store) -> None:
    """Live tickets in the order of issue; ended ones as counts, and those whose row waits to be issued again."""
    live = [ticket(i, s) for i, s in enumerate((TicketState.ISSUED, TicketState.READY, TicketState.LEASED))]
    trained = ticket(3, TicketState.TRAINED, step=1, trained_version=1)
    forgotten = ticket(4, TicketState.FORGOTTEN, step=1, trained_version=1)
    dropped = [ticket(i, TicketState.DROPPED, reason=reason) for i, reason in ((5, "a"), (6, "b"), (7, "b"))]
    again = ticket(8, TicketState.REISSUED, reason="expired")
    waiting = ticket(8, TicketState.REISSUED, attempt=1, reason="expired")
    superseded = ticket(9, TicketState.REISSUED, reason="expired")
    successor = ticket(9, attempt=1)
    everything = [successor, *reversed(live), trained, forgotten, *dropped, again, waiting, superseded]
    commit(store, *everything)
    assert store.load() == StoreContents(
        live=[*live, trained, successor],
        to_reissue=[waiting],
        next_index=10,
        counts={
            TicketState.ISSUED: 2,
            TicketState.READY: 1,
            TicketState.LEASED: 1,
            TicketState.TRAINED: 1,
            TicketState.FORGOTTEN: 1,
            TicketState.DROPPED: 3,
            TicketState.REISSUED: 3,
        },
        drops={"a": 1, "b": 2},
        tokens_sampled=4 * FACTS.tokens,
    )


def test_sampled_tokens_of_dropped_groups_are_added_up_by_reason_also_of_pruned_ones(store: Store) -> None:
    dropped = [ticket(i, TicketState.DROPPED, reason=why, group=FACTS) for i, why in enumerate("aab")]
    failed = ticket(3, TicketState.DROPPED, reason="a")
    commit(store, *dropped, failed)
    for below in (0, 1):
        decide(store, Decision(run=RunState(pruned_below=below)))
        assert store.load().tokens_dropped == {"a": 2 * FACTS.tokens, "b": FACTS.tokens}
        assert store.load().drops == {"a": 3, "b": 1}


def test_estimates_of_rows_come_back_as_they_were_and_the_newest_replaces_the_others(store: Store) -> None:
    third = float(np.float32(1 / 3))
    decide(store, Decision(rows=(RowRecord(4, 1, 1e30, third), RowRecord(2**31, 1, -third, 0.0))))
    decide(store, Decision(rows=(RowRecord(4, 2, third, 1e-30),)), Decision(rows=(RowRecord(0, 1, 0.0, 0.0),)))
    assert store.load().rows == [RowRecord(0, 1), RowRecord(4, 2, third, 1e-30), RowRecord(2**31, 1, -third)]


def test_a_commit_replaces_the_record_before_it(store: Store) -> None:
    commit(store, ticket(0))
    commit(store, ticket(0, TicketState.READY), **{"0_0": b"group"})
    assert store.load().counts == {TicketState.READY: 1}
    assert store.payloads(["0.0"]) == {"0.0": Payload.of(b"group")}


@pytest.mark.parametrize("state", list(TicketState))
def test_a_payload_goes_with_the_ticket_that_no_longer_holds_one(store: Store, state: TicketState) -> None:
    commit(store, ticket(0, TicketState.READY), ticket(1, TicketState.READY), **{"0_0": b"zero", "1_0": b"one"})
    commit(store, ticket(0, state, group=FACTS))
    kept = {"0.0": Payload.of(b"zero")} if state in HOLDS_PAYLOAD else {}
    assert store.payloads(["0.0", "1.0", "7.0"]) == {**kept, "1.0": Payload.of(b"one")}


def test_a_commit_that_fails_changes_nothing(store: Store, run_config: RunConfig) -> None:
    if not VARIANTS[run_config.queue.store_kind]:
        pytest.skip("nothing can fail in memory")
    commit(store, ticket(0))
    before = store.load()
    broken: Any = object()
    after = {record.id: record for record in (ticket(0, TicketState.READY), ticket(1))}
    unsound = {**after, "2.0": ticket(2, worker_id=broken)}
    groups = {"0.0": Payload.of(b"group")}
    with pytest.raises(StoreError):
        store.commit(Changes(tickets=unsound, run=RunState(session=1), payloads=groups))
    assert store.load() == before
    assert store.payloads(["0.0"]) == {}
    store.commit(Changes(tickets=after, run=RunState(session=1), payloads=groups))
    assert store.load().run.session == 1


def test_a_payload_keeps_its_checksum_and_shows_a_changed_byte(store: Store) -> None:
    body = bytes(range(256)) * 1000
    commit(store, ticket(0, TicketState.READY), **{"0_0": body})
    (found,) = store.payloads(["0.0"]).values()
    assert (found, found.sound_body) == (Payload.of(body), body)
    assert msgspec.structs.replace(found, body=b"\1" + body[1:]).sound_body is None
    store.commit(Changes(payloads={"0.0": Payload(body, None)}))
    assert store.payloads(["0.0"])["0.0"].checksum is None


def test_many_records_and_payloads_are_asked_for_at_once(store: Store) -> None:
    tickets = [ticket(index, TicketState.READY) for index in range(250)]
    commit(store, *tickets, **{f"{record.index}_0": b"x" for record in tickets})
    names = [record.id for record in reversed(tickets)]
    assert list(store.records([*names, "7.7"])) == names
    assert set(store.payloads([*names, "7.7"])) == set(names)
    assert (store.records([]), store.payloads([])) == ({}, {})


def test_decisions_that_are_committed_together_leave_what_they_would_one_by_one(store: Store) -> None:
    one_by_one = [
        Decision((ticket(0), ticket(1)), RunState(session=1)),
        Decision((ticket(0, TicketState.READY),)),
        Decision(
            (ticket(0, TicketState.TRAINED, step=1), ticket(1, TicketState.DROPPED, reason="a")), RunState(step=1)
        ),
        Decision((ticket(0, TicketState.FORGOTTEN, step=1),), servers=(ServerRecord(Server("a", "u")),)),
        Decision((ticket(2, TicketState.READY),), RunState(step=1, pruned_below=1)),
    ]
    bodies = {"0.0": Payload.of(b"zero"), "2.0": Payload.of(b"two")}
    together = MemoryStore()
    for decision in one_by_one:
        held = {record.id: bodies[record.id] for record in decision.tickets if record.state is TicketState.READY}
        together.commit(Changes.of([decision], held, together.load().run.pruned_below))
    store.commit(Changes.of(one_by_one, bodies))
    assert store.load() == together.load()
    assert store.payloads([*bodies]) == together.payloads([*bodies]) == {"2.0": bodies["2.0"]}


def test_the_size_grows_with_what_is_stored(store: Store) -> None:
    before = store.size()
    assert before.bytes >= before.log_bytes >= 0
    commit(
        store,
        *(ticket(index, TicketState.READY) for index in range(20)),
        **{f"{n}_0": b"x" * 50_000 for n in range(20)},
    )
    assert store.size().bytes > before.bytes + 900_000


def test_forgotten_after_finds_what_a_resume_must_issue_again(store: Store) -> None:
    forgotten = [ticket(step, TicketState.FORGOTTEN, step=step, trained_version=step) for step in (1, 2, 3)]
    commit(store, *forgotten, ticket(7, TicketState.TRAINED, step=5), ticket(8, TicketState.REISSUED, step=5))
    assert sorted(store.forgotten_after(1), key=lambda record: record.index) == forgotten[1:]
    assert store.forgotten_after(3) == []
    assert [store.first_forgotten_after(step) for step in (0, 1, 3)] == [1, 2, None]


def test_tickets_below_the_mark_are_kept_as_sums_that_go_on_agreeing(store: Store) -> None:
    """Two prunings, so that the second adds to the first; index 3 is out and keeps what follows."""
    commit(
        store,
        ticket(0, TicketState.FORGOTTEN, step=1),
        ticket(1, TicketState.REISSUED, reason="expired"),
        ticket(1, TicketState.DROPPED, attempt=1, reason="a", group=FACTS),
        ticket(2, TicketState.DROPPED, reason="a"),
        ticket(3),
        ticket(4, TicketState.DROPPED, reason="b"),
    )
    before = store.load()
    for below in (1, 1, 3):
        run = RunState(pruned_below=below)
        decide(store, Decision(run=run))
        assert msgspec.structs.replace(store.load(), run=before.run) == before
    assert set(store.records([record_id for i in range(5) for record_id in (f"{i}.0", f"{i}.1")])) == {"3.0", "4.0"}
    commit(store, ticket(3, TicketState.DROPPED, reason="b"))
    decide(store, Decision(run=RunState(pruned_below=5)))
    contents = store.load()
    assert (contents.next_index, contents.drops, contents.tokens_sampled) == (5, {"a": 2, "b": 2}, 2 * FACTS.tokens)
    assert contents.counts == {TicketState.FORGOTTEN: 1, TicketState.REISSUED: 1, TicketState.DROPPED: 4}


def test_a_store_that_was_closed_opens_again_with_what_it_keeps(run_config: RunConfig) -> None:
    store = active(run_config)
    decision = Decision((ticket(0, TicketState.READY),), RunState(version=3), (ServerRecord(Server("a", "u")),))
    store.commit(Changes.of([decision], {"0.0": Payload.of(b"group")}))
    before = store.load()
    store.close()
    again = active(run_config)
    if VARIANTS[run_config.queue.store_kind]:
        assert again.load() == before
        assert again.payloads(["0.0"]) == {"0.0": Payload.of(b"group")}
    else:
        assert again.load() == StoreContents()
    again.close()


def test_evaluations_come_back_and_let_go_of_their_tickets_at_their_end(store: Store) -> None:
    one = EvalRecord(0, 5, 4, 8, 2, 0.5, 60.0, 1.5, rows=8, next_row=2)
    other = EvalRecord(1, 10, 9, None, 1, None, 60.0, 2.5)
    result = RowResult((0.5, 1.0), {"right": 0.75}, (3, 4), {"stop": 2})
    group = GroupFacts(9, 7, 4, (SampledBy("vllm-0", 4, 5),))
    done = TicketRecord(0, 1, 7, "w", 4, TicketState.EVALUATED, 1, group=group, evaluation=0, result=result)
    out = TicketRecord(1, 0, 7, "v", 4, evaluation=0)
    elsewhere = TicketRecord(0, 0, 7, "v", 4, evaluation=1)
    before = TicketRecord(0, 0, 7, "v", 4, TicketState.REISSUED, 1, "expired", evaluation=0)
    decide(store, Decision((before, out, elsewhere), evaluations=(one, other)))
    decide(store, Decision((done,)))
    contents = store.load()
    assert contents.evaluations == [one, other]
    assert contents.evaluation_tickets == [done, out, elsewhere]
    assert (contents.live, contents.to_reissue, contents.counts, contents.next_index) == ([], [], {}, 0)
    ended = msgspec.structs.replace(one, result=Evaluation(5, 4, 2, rows=8, versions=(4, 5)))
    decide(store, Decision(evaluations=(ended,)))
    contents = store.load()
    assert (contents.evaluations, contents.evaluation_tickets) == ([ended, other], [elsewhere])
    decide(store, Decision(forgotten=(0, 1)))
    assert store.load() == StoreContents()
