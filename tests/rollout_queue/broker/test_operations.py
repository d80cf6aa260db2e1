"""The broker's operations without HTTP: messages in, messages out."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.protocol import reasons
from slipstream.protocol.messages import (
    BeginSession,
    Checkpointed,
    Fingerprint,
    FinishRun,
    LearnerProcess,
    LeaseAck,
    LeaseRenewal,
    LeaseRequest,
    Server,
    ServerChange,
    ServerState,
    TicketFailure,
    TicketRequest,
    Waiting,
    WorkerReport,
)
from slipstream.protocol.status import EvaluationRequest
from slipstream.rollout_queue.broker import learner, lifecycle, status, workers
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.payload_cache import PayloadCache
from slipstream.rollout_queue.ledger import leases
from slipstream.rollout_queue.ledger.open_evaluations import EvalTally
from slipstream.rollout_queue.ledger.records import Refusal, RunState, TicketRecord, TicketState
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.sqlite import SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME, groups_of
from tests.kit import config
from tests.kit.broker import DECLARED, FOUND, URL, draw, running, stays, submit
from tests.kit.messages import SERVER
from tests.kit.queue import FakeTime


async def has_left() -> bool:
    return True


async def never_read() -> bytes:
    raise AssertionError("the body was read")


def sums(broker: Broker) -> tuple[int, int, int, int, int]:
    ledger = broker.ledger.summary()
    return ledger.issued, ledger.trained, ledger.dropped, ledger.reissued, ledger.outstanding


async def test_a_group_goes_from_ticket_to_trained() -> None:
    async with running() as broker:
        (ticket,) = await draw(broker)
        assert await submit(broker, ticket) is True
        reply = await learner.lease(broker, LeaseRequest(1, "l", 8, wait_s=0.0), stays)
        assert (len(reply.groups), reply.version_at_arrival, reply.revoked) == (1, [0], {})
        position = await learner.acknowledge(broker, "l", LeaseAck(1, [ticket.id], step=1, version=1))
        assert (position.step, position.version) == (1, 1)
        position = await learner.command(broker, Checkpointed(1, 1))
        assert position.checkpoint_step == 1
        assert sums(broker) == (1, 1, 0, 0, 0)


async def test_i7_workers_wait_for_a_data_set_before_rows_can_be_chosen_and_the_status_says_so() -> None:
    """As under a learner of one's own that declares no fingerprint."""
    async with running(task={"path": "task.py:task", "order": "learnable"}) as broker:
        assert await draw(broker) == []
        (wait,) = [wait for wait in status.assemble(broker).waits if wait.who == "w"]
        assert "no worker has named its rows" in wait.what
        position = await learner.command(broker, BeginSession(0, 0, 100, resume=False, fingerprint=DECLARED))
        await workers.heartbeat(broker, WorkerReport("w", [], fingerprint=FOUND))
        (ticket,) = await draw(broker)
        assert (position.session, ticket.row) == (2, 0)
        await submit(broker, ticket)
        rows = status.assemble(broker).rows
        assert rows is not None
        assert (rows.rows, rows.tried, rows.teaching) == (FOUND.rows, 1, 1)


async def test_a_repeated_group_is_not_read_again() -> None:
    async with running() as broker:
        (ticket,) = await draw(broker)
        await submit(broker, ticket)
        assert await workers.submit_group(broker, ticket.id, never_read) is False
        assert sums(broker) == (1, 0, 0, 0, 1)


async def test_a_group_of_an_unknown_ticket_is_refused_unread_and_counted() -> None:
    async with running() as broker:
        with pytest.raises(Refusal) as refused:
            await workers.submit_group(broker, "7.0", never_read)
        assert refused.value.reason == reasons.TICKET_UNKNOWN
        assert broker.observations.rejections == {reasons.TICKET_UNKNOWN: 1}


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (reasons.FULL, TicketState.ISSUED),
        (reasons.UNREGISTERED, TicketState.ISSUED),
        (reasons.WORKER_MISMATCH, TicketState.ISSUED),
        (reasons.TOO_LARGE, None),
    ],
)
async def test_a_refused_body_ends_its_ticket_unless_its_group_may_still_come(
    reason: str, state: TicketState | None
) -> None:
    async def refuse() -> bytes:
        raise Refusal(reason, "made up")

    async with running() as broker:
        (ticket,) = await draw(broker)
        with pytest.raises(Refusal, match="made up"):
            await workers.submit_group(broker, ticket.id, refuse)
        record = broker.ledger.get(ticket.id)
        assert (record and record.state) == state
        assert broker.observations.rejections[reason] == 1
        again = (await draw(broker))[0]
        assert again.index == (0 if state is None else 1)


async def test_nothing_is_issued_or_leased_to_a_caller_that_has_hung_up() -> None:
    async with running() as broker:
        assert await workers.draw_tickets(broker, TicketRequest("w", 1, wait_s=0.0), has_left) is None
        assert sums(broker)[0] == 0
        (ticket,) = await draw(broker)
        await submit(broker, ticket)
        reply = await learner.lease(broker, LeaseRequest(1, "l", 8, wait_s=0.0), has_left)
        assert reply.groups == []
        assert broker.ledger.count(TicketState.READY) == 1


async def test_the_prompts_of_groups_that_are_lost_on_the_disk_are_sampled_again_while_attempts_are_left(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path / FILE_NAME)
    store.acquire()
    async with running(store, queue={"ticket_attempts": 2, "max_staleness": 4}) as broker:
        for attempt in (0, 1):
            tickets = await draw(broker, 2)
            assert [ticket.id for ticket in tickets] == [f"0.{attempt}", f"1.{attempt}"]
            for ticket in tickets:
                await submit(broker, ticket)
            broker.recent_payloads = PayloadCache()
            (file,) = groups_of(tmp_path / FILE_NAME).iterdir()
            held = file.read_bytes()
            file.write_bytes(bytes([*held[:-1], held[-1] ^ 1]) if attempt else b"")
            leased = await learner.lease(broker, LeaseRequest(1, f"lease-{attempt}", 2, wait_s=0.0), stays)
            assert len(leased.groups) == attempt
            if not attempt:
                assert sums(broker) == (2, 0, 0, 2, 0)
                file.write_bytes(held)
        assert sums(broker) == (4, 0, 1, 2, 1)
        assert [ticket.id for ticket in await draw(broker)] == ["2.0"]
        (notice,) = broker.observations.notices.list(broker.now)
        assert (notice.kind, "its prompt is sampled again, up to queue.ticket_attempts" in notice.text) == (
            reasons.DAMAGED,
            True,
        )


async def test_a_lost_answer_is_delivered_again_and_nothing_new_is_issued() -> None:
    async with running() as broker:
        (ticket,) = await draw(broker)
        (same,) = await draw(broker, have=[])
        assert same.id == ticket.id
        (other,) = await draw(broker, have=[ticket.id])
        assert other.id != ticket.id


async def test_a_waiting_worker_gets_a_ticket_as_soon_as_another_gives_one_back() -> None:
    async with running(queue={"max_staleness": 0}) as broker:
        held = await draw(broker, 100)
        waiting = asyncio.create_task(draw(broker, wait_s=30.0))
        await asyncio.sleep(0)  # until it waits: nothing in between awaits
        assert [wait.who for wait in broker.observations.waits.list(broker.now)] == ["w"]
        await workers.fail_ticket(broker, held[0].id, TicketFailure("w", reasons.SERVER))
        (again,) = await asyncio.wait_for(waiting, 10.0)
        assert again.index == held[0].index


async def test_only_the_holder_of_a_ticket_can_fail_it() -> None:
    async with running() as broker:
        (ticket,) = await draw(broker)
        await workers.fail_ticket(broker, ticket.id, TicketFailure("another", reasons.SERVER))
        assert sums(broker) == (1, 0, 0, 0, 1)
        await workers.fail_ticket(broker, ticket.id, TicketFailure("w", reasons.SERVER))
        await workers.fail_ticket(broker, ticket.id, TicketFailure("w", reasons.SERVER))
        assert sums(broker) == (1, 0, 0, 1, 0)


async def test_a_heartbeat_names_the_tickets_that_the_worker_has_lost() -> None:
    async with running() as broker:
        (ticket,) = await draw(broker)
        reply = await workers.heartbeat(broker, WorkerReport("w", ticket_ids=[ticket.id, "9.0"]))
        assert reply.lost_tickets == ["9.0"]
        reply = await workers.heartbeat(broker, WorkerReport("thief", ticket_ids=[ticket.id]))
        assert reply.lost_tickets == [ticket.id]


async def test_an_older_session_changes_nothing() -> None:
    async with running() as broker:
        (ticket,) = await draw(broker)
        await submit(broker, ticket)
        await learner.command(broker, BeginSession(0, 0, 100, resume=False))
        before = sums(broker)
        calls: list[Any] = [
            lambda: learner.command(broker, Checkpointed(1, 0)),
            lambda: learner.command(broker, Waiting(1, "groups")),
            lambda: learner.lease(broker, LeaseRequest(1, "l", 8, wait_s=0.0), stays),
            lambda: learner.acknowledge(broker, "l", LeaseAck(1, [ticket.id], step=1, version=1)),
            lambda: learner.release_lease(broker, "l", LeaseRenewal(1)),
            lambda: learner.put_server(broker, ServerChange(Server(SERVER, URL, ServerState.STALE), 1)),
            lambda: learner.finish(broker, FinishRun(1)),
        ]
        for call in calls:
            with pytest.raises(Refusal) as refused:
                await call()
            assert refused.value.reason == reasons.SESSION_SUPERSEDED
        with pytest.raises(Refusal, match="session 1 is not the current one, 2"):
            await learner.renew_lease(broker, "l", LeaseRenewal(1))
        assert sums(broker) == before
        assert not broker.ledger.run.finished


async def test_of_two_learners_that_start_at_once_the_second_is_refused() -> None:
    """Both had looked, and seen nobody; unless it says that it takes the run over."""
    one, two = LearnerProcess("here", 7, 1.0), LearnerProcess("there", 8, 2.0)
    async with running() as broker:
        seen = (await learner.read_position(broker)).session
        await learner.command(broker, BeginSession(0, 0, 100, resume=True, process=one, after=seen))
        with pytest.raises(Refusal, match=r"process 7 on here has begun a session.*--take-over") as refused:
            await learner.command(broker, BeginSession(0, 0, 100, resume=True, process=two, after=seen))
        assert refused.value.reason == reasons.SESSION_SUPERSEDED
        asked_again = await learner.command(broker, BeginSession(0, 0, 100, resume=True, process=one, after=seen))
        assert asked_again.session > seen
        taken = await learner.command(broker, BeginSession(0, 0, 100, resume=True, process=two))
        assert taken.learner is not None
        assert taken.learner.pid == two.pid


async def test_a_finished_run_gives_no_tickets_and_drops_what_is_out() -> None:
    async with running() as broker:
        await draw(broker, 2)
        assert (await learner.finish(broker, FinishRun(1))).finished
        assert sums(broker) == (2, 0, 2, 0, 0)
        with pytest.raises(Refusal) as refused:
            await draw(broker)
        assert refused.value.reason == reasons.RUN_FINISHED


async def test_a_queue_that_outlives_its_run_says_why_and_how_to_end_it_once_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> int:
        return caplog.text.count("the run has finished. This queue stays up for its status and its rollouts")

    caplog.set_level(logging.INFO, "slipstream.rollout_queue")
    once = config(learner={"steps": 1})
    made = SqliteStore(tmp_path / "queue.db")
    made.acquire()
    made.commit(Changes(run=RunState(version=1, step=1, total_steps=1, session=1, id="run-1")))
    made.close()
    async with lifecycle.running(broker := Broker(once, SqliteStore(tmp_path / "queue.db"), FakeTime().clock())):
        assert said() == 0
        for _ in range(2):
            await learner.finish(broker, FinishRun(1))
        assert said() == 1
    for steps, times in ((1, 2), (9, 2)):
        again = config(learner={"steps": steps})
        async with lifecycle.running(broker := Broker(again, SqliteStore(tmp_path / "queue.db"), FakeTime().clock())):
            assert broker.ready
            assert said() == times, "more steps may be made"


async def test_a_server_drains_until_no_worker_uses_it_and_goes_at_once_on_request() -> None:
    async with running() as broker:
        await workers.heartbeat(broker, WorkerReport("w", [], draining={SERVER: 1}))
        (server,) = await learner.remove_server(broker, SERVER, now=False)
        assert server.state is ServerState.DRAINING
        for now in (True, True, False):  # repeats, as after a lost answer
            assert await learner.remove_server(broker, SERVER, now) == []
        with pytest.raises(Refusal) as refused:
            await learner.remove_server(broker, "vllm-7", now=True)
        assert refused.value.reason == reasons.SERVER_UNKNOWN


async def test_a_queue_starts_although_a_server_of_its_run_file_still_drains_at_another_address(tmp_path: Path) -> None:
    """The address in the run file changed meanwhile. The queue refused its own server, and never came up again."""
    path = tmp_path / "queue.db"
    one = Broker(config(vllm={"servers": ["http://127.0.0.1:7001"]}), SqliteStore(path), FakeTime().clock())
    async with lifecycle.running(one):
        await learner.command(one, BeginSession(0, 0, 100, resume=False))
        (server,) = one.fleet.servers
        await workers.heartbeat(one, WorkerReport("w", [], draining={server.name: 1}))
        await learner.remove_server(one, server.name, now=False)
        assert one.fleet.servers[0].state is ServerState.DRAINING
        one.close_waits()
    two = Broker(config(vllm={"servers": ["http://127.0.0.1:7002"]}), SqliteStore(path), FakeTime().clock())
    async with lifecycle.running(two):
        (server,) = two.fleet.servers
        assert (server.url, server.state) == ("http://127.0.0.1:7002", ServerState.JOINING)
        two.close_waits()


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ([(ServerState.QUARANTINED, 0), (ServerState.SYNCING, None), (ServerState.SERVING, 0)], "unverified_server"),
        ([(ServerState.JOINING, None)], None),
    ],
    ids=["its proof failed, and the same version was proven later", "its server was restarted"],
)
async def test_i5_a_ticket_of_an_evaluation_came_before_a_proof_or_restart_though_none_of_the_training_came_between(
    states: list[tuple[ServerState, int | None]], reason: str | None
) -> None:
    """It had the serial of the next training ticket, and so counted as issued later."""
    declared = Fingerprint("1", "t", "c", {})
    found = msgspec.structs.replace(declared, rows=9, data="d", eval_rows=4, eval_data="e")
    async with running(eval={"every": 1, "share": 1.0}) as broker:
        await learner.command(broker, BeginSession(0, 0, 100, resume=False, fingerprint=declared))
        await workers.heartbeat(broker, WorkerReport("w", [], capacity=4, fingerprint=found))
        (train,) = await draw(broker)
        request = EvaluationRequest(2, 0, 0, rows=None, group_size=2, temperature=None, timeout_s=1000.0)
        await learner.ask_for_evaluation(broker, request)
        (before,) = await draw(broker)
        for state, version in states:
            await learner.put_server(broker, ServerChange(Server(SERVER, URL, state, version), 2))
        assert (before.kind, train.kind) == ("eval", "train")
        for ticket in (train, before):
            if reason is None:
                assert await submit(broker, ticket) is True
            else:
                with pytest.raises(Refusal) as refused:
                    await submit(broker, ticket)
                assert refused.value.reason == reason
        if reason is not None:
            assert [await submit(broker, ticket) for ticket in await draw(broker, 2)] == [True] * 2


async def test_a_proof_that_fails_adds_an_evaluation_up_again_once_however_many_rows_it_takes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole sum was made again for each row: 4,000 rows kept the queue from answering for 50 seconds."""
    rows, added = 64, list[str]()
    declared = Fingerprint("1", "t", "c", {})
    found = msgspec.structs.replace(declared, rows=9, data="d", eval_rows=rows, eval_data="e")
    async with running(eval={"every": 1, "share": 1.0}) as broker:
        await learner.command(broker, BeginSession(0, 0, 100, resume=False, fingerprint=declared))
        await workers.heartbeat(broker, WorkerReport("w", [], capacity=2 * rows, fingerprint=found))
        request = EvaluationRequest(2, 0, 0, rows=None, group_size=2, temperature=None, timeout_s=1000.0)
        await learner.ask_for_evaluation(broker, request)
        issued = await draw(broker, rows)
        assert [ticket.kind for ticket in issued] == ["eval"] * rows
        for ticket in issued[: rows - 1]:
            assert await submit(broker, ticket)
        add = EvalTally.add

        def counted(tally: EvalTally, ticket: TicketRecord) -> None:
            added.append(ticket.id)
            add(tally, ticket)

        monkeypatch.setattr(EvalTally, "add", counted)
        await learner.put_server(broker, ServerChange(Server(SERVER, URL, ServerState.QUARANTINED, 0), 2))
        (evaluation,) = broker.evaluation_views()
        assert (evaluation.done, evaluation.failed, evaluation.ended) == (0, 0, None)
        assert len(added) <= 3 * rows
        assert [ticket.id for ticket in broker.ledger.held_by("w")] == [issued[-1].id]


async def test_a_worker_that_knows_the_fleet_is_not_told_of_it_again() -> None:
    async with running() as broker:
        first = await workers.draw_tickets(broker, TicketRequest("w", 1, wait_s=0.0), stays)
        assert first is not None
        assert first.servers == broker.fleet.servers
        known = TicketRequest("w", 1, wait_s=0.0, fleet=first.fleet)
        again = await workers.draw_tickets(broker, known, stays)
        assert again is not None
        assert (again.servers, again.fleet) == (None, first.fleet)
        report = WorkerReport("w", [], fleet=first.fleet)
        assert (await workers.heartbeat(broker, report)).servers is None
        await learner.put_server(broker, ServerChange(Server(SERVER, URL, ServerState.STALE), 1))
        told = await workers.heartbeat(broker, report)
        assert [server.state for server in told.servers or []] == [ServerState.STALE]
        assert told.fleet != first.fleet
        uses = await workers.draw_tickets(broker, msgspec.structs.replace(known, serving=[SERVER]), stays)
        assert uses is not None
        assert uses.servers == broker.fleet.servers


@pytest.mark.parametrize("asks", ["for a ticket", "to take its group"])
async def test_a_worker_that_waits_while_a_session_begins_is_not_taken_for_one_of_it_before_it_is_admitted(
    asks: str,
) -> None:
    async with running() as broker:
        (held,) = await draw(broker)
        async with broker.lock:  # as `command` holds it while it reads the store
            asking = asyncio.create_task(draw(broker) if asks == "for a ticket" else submit(broker, held))
            await asyncio.sleep(0.01)
            declared = Fingerprint("1", "t", "c", {})
            begin = BeginSession(0, 0, 100, resume=False, fingerprint=declared)
            broker.apply(leases.begin(broker.ledger, begin, ()))
        with pytest.raises(Refusal) as refused:
            await asking
        assert refused.value.reason == reasons.UNREGISTERED
        assert broker.ledger.get(held.id, TicketState.ISSUED)


async def test_workers_that_register_at_once_are_no_more_than_there_may_be() -> None:
    """They wait for the same lock: each looks for room once it has it."""
    async with running(queue={"max_workers": 2}) as broker:
        async with broker.lock:
            beats = [asyncio.create_task(workers.heartbeat(broker, WorkerReport(name, []))) for name in "abc"]
            await asyncio.sleep(0.01)
        found = await asyncio.gather(*beats, return_exceptions=True)
        assert [getattr(answer, "reason", None) for answer in found] == [None, None, reasons.BUSY]
