"""Workers are let in by their fingerprint: what would make wrong data is refused, and the difference named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from slipstream.protocol import access, reasons
from slipstream.protocol.client import QueueClient, QueueRefused
from slipstream.protocol.config import fingerprint
from slipstream.protocol.messages import (
    BeginSession,
    Fingerprint,
    LeaseRequest,
    TicketReply,
    TicketRequest,
    WorkerReply,
    WorkerReport,
)
from slipstream.rollout_queue.ledger.records import Refusal, RunState
from slipstream.rollout_queue.ledger.registration import admit
from slipstream.rollout_queue.store.base import Store
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit import config, group
from tests.kit.queue import Served, serve_version, serving

DECLARED = Fingerprint("1.0", "digits", "template", {"rollout.temperature": "1.0"})
GIVEN = msgspec.structs.replace(DECLARED, rows=6, data="rows", task="task")


def other(**changes: Any) -> Fingerprint:
    return msgspec.structs.replace(GIVEN, **changes)


@asynccontextmanager
async def running(
    declared: Fingerprint | None = DECLARED, store: Store | None = None
) -> AsyncIterator[tuple[Served, QueueClient]]:
    async with serving(config(), store) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        await begin(client, declared)
        await serve_version(client, 0)
        yield queue, client


async def begin(client: QueueClient, declared: Fingerprint | None = DECLARED) -> None:
    resume = (await client.position()).session > 0
    await client.begin_session(BeginSession(0, 0, 100, resume=resume, fingerprint=declared, vocabulary=64))


async def beat(client: QueueClient, worker: str = "w", given: Fingerprint | None = GIVEN, **fields: Any) -> WorkerReply:
    return await client.heartbeat(WorkerReport(worker, **{"ticket_ids": [], "fingerprint": given, **fields}))


async def ask(client: QueueClient, worker: str = "w", count: int = 1, **fields: Any) -> TicketReply:
    request = TicketRequest(worker, count, **{"wait_s": 0.0, **fields})
    body = await client.call("POST", access.TICKETS, request, wait_s=request.wait_s)
    return msgspec.json.decode(body, type=TicketReply) if body else TicketReply([], None)


async def refusal(call: Any) -> tuple[int, str]:
    with pytest.raises(QueueRefused) as refused:
        await call
    return refused.value.status, refused.value.reason


async def test_two_workers_of_one_name_are_told_and_one_that_was_started_again_is_not() -> None:
    async with running() as (_, client):
        for pid in (1, 1, 2, 2):
            assert not (await beat(client, host="a", pid=pid)).warnings
        (warning,) = (await beat(client, host="a", pid=1)).warnings
        await beat(client, host="a", pid=2)
        assert warning.startswith("two workers are called w, process 1 on a and process 2 on a: ")
        assert [notice.text for notice in (await client.status()).notices] == [warning]


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("the tokenizer differs: swapped, the run has digits", other(tokenizer="swapped")),
        ("the chat format, its template or its parser differs", other(chat="another")),
        ("rollout.temperature = 0.7, the run has 1.0", other(rollout={"rollout.temperature": "0.7"})),
        ("its release is 2.0", other(chat="another", release="2.0")),
        ("sent no fingerprint, so nothing says that its groups are right; install Slipstream 1.0", None),
    ],
)
def test_what_would_make_wrong_data_is_refused_and_named(named: str, given: Fingerprint | None) -> None:
    with pytest.raises(Refusal) as refused:
        admit(RunState(session=1, declared=DECLARED), "gpu-7", given)
    assert refused.value.reason == reasons.FINGERPRINT
    assert refused.value.message.startswith("worker gpu-7 would make wrong data: ")
    assert named in refused.value.message


def test_another_release_alone_is_no_reason() -> None:
    assert admit(RunState(session=1, declared=DECLARED), "w", other(release="2.0")).warnings == ()


def test_where_nothing_is_declared_every_worker_is_let_in() -> None:
    assert not admit(RunState(session=1), "w", None).decision


@pytest.mark.parametrize("changed", [{"rows": 5}, {"data": "other rows"}])
def test_the_first_worker_of_a_session_gives_the_data_set(changed: dict[str, Any]) -> None:
    run = admit(RunState(session=1, declared=DECLARED), "first", GIVEN).decision.run
    assert run is not None
    assert not admit(run, "second", GIVEN).decision
    with pytest.raises(Refusal, match="give all workers one data set"):
        admit(run, "third", other(**changed))
    # A new session asks again, and says so if the answer is another.
    admitted = admit(msgspec.structs.replace(run, session=2), "third", other(**changed))
    assert "not the one of the session before" in (admitted.changed or "")
    assert admit(msgspec.structs.replace(run, session=2), "third", GIVEN).changed is None


def test_i9_another_setting_in_a_new_session_is_no_change_of_the_data_set() -> None:
    warmer = {"rollout.temperature": "0.7"}
    run = RunState(session=2, declared=msgspec.structs.replace(DECLARED, rollout=warmer), data=GIVEN, data_session=1)
    assert admit(run, "w", other(rollout=warmer)).changed is None


def test_attack_12_a_worker_that_names_no_data_set_is_refused() -> None:
    with pytest.raises(Refusal, match="names no data set"):
        admit(RunState(session=1, declared=DECLARED), "w", other(rows=None, data=None))


def test_a_worker_whose_data_set_is_an_iterable_is_admitted() -> None:
    stream = other(rows=None)
    run = admit(RunState(session=1, declared=DECLARED), "w", stream).decision.run
    assert run is not None
    assert run.data == stream
    with pytest.raises(Refusal, match="rows of the data set differ"):
        admit(run, "wrong", other(rows=None, data="other rows"))


def test_the_parts_of_a_data_set_are_compared_and_those_of_the_first_that_read_them_count() -> None:
    run = admit(RunState(session=1, declared=DECLARED), "slow", other(data=None)).decision.run
    assert run is not None
    run = admit(run, "first", other(parts={"a": 2, "b": 4})).decision.run
    assert run is not None
    assert run.data is not None
    assert run.data.parts == {"a": 2, "b": 4}
    with pytest.raises(Refusal, match="rows of each part"):
        admit(run, "wrong", other(parts={"a": 3, "b": 3}))


def test_attack_12_the_first_worker_that_could_read_its_rows_gives_the_rows_of_the_session() -> None:
    run = admit(RunState(session=1, declared=DECLARED), "slow", other(data=None, task=None)).decision.run
    assert run is not None
    with pytest.raises(Refusal, match="5 rows, the run's has 6"):
        admit(run, "few", other(rows=5, data=None))
    run = admit(run, "first", GIVEN).decision.run
    assert run is not None
    assert run.data == GIVEN
    with pytest.raises(Refusal, match="rows of the data set differ"):
        admit(run, "wrong", other(data="other rows"))
    assert not admit(run, "slow", other(data=None)).decision


async def test_a_refused_worker_gets_no_ticket_and_what_it_held_goes_to_others() -> None:
    async with running() as (queue, client):
        await beat(client)
        await beat(client, "other")
        held = (await ask(client, count=2)).tickets
        assert await refusal(beat(client, given=other(tokenizer="swapped"))) == (403, reasons.FINGERPRINT)
        assert await refusal(ask(client)) == (409, reasons.UNREGISTERED)
        assert await refusal(client.submit(group(held[0]))) == (410, reasons.TICKET_ENDED)
        again = (await ask(client, "other", count=2)).tickets
        assert [ticket.id for ticket in again] == ["0.1", "1.1"]
        assert [record.failures for record in queue.broker.ledger.to_reissue.values()] == []
        notices = [notice for notice in (await client.status()).notices if notice.kind == reasons.FINGERPRINT]
        assert [notice.who for notice in notices] == ["w"]
        assert "the tokenizer differs" in notices[0].text


async def test_a_changed_task_file_is_a_warning_and_a_notice() -> None:
    async with running() as (_, client):
        assert (await beat(client)).warnings == []
        for _ in range(2):
            assert "another task file" in (await beat(client, "late", other(task="new"))).warnings[0]
        assert ["another task file" in notice.text for notice in (await client.status()).notices] == [True]


def test_i10_another_version_of_what_writes_prompts_is_a_warning() -> None:
    run = admit(RunState(session=1, declared=DECLARED), "first", other(libraries={"transformers": "5.1"})).decision.run
    assert run is not None
    (told,) = admit(run, "late", other(libraries={"transformers": "5.2", "renderers": "0.1"})).warnings
    assert told.startswith("worker late has transformers 5.2, the session's first worker 5.1: ")
    assert not admit(run, "older", GIVEN).warnings, "a worker of an earlier release names none"


async def test_a_worker_of_before_the_session_is_compared_again() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await beat(client, given=None)
        waiting = asyncio.create_task(ask(client, wait_s=30.0))
        await asyncio.sleep(0.05)
        await begin(client)
        assert await refusal(waiting) == (409, reasons.UNREGISTERED)
        assert await refusal(beat(client, given=None)) == (403, reasons.FINGERPRINT)


async def test_after_a_restart_of_the_queue_workers_register_before_they_go_on(tmp_path: Path) -> None:
    """The session's fingerprint and data set are in the store; who was let in is not. No ticket is lost by it."""
    async with running(store=SqliteStore(tmp_path / "queue.db")) as (_, client):
        await beat(client)
        ticket = (await ask(client)).tickets[0]
    async with serving(config(), SqliteStore(tmp_path / "queue.db")) as queue, QueueClient(queue.url) as client:
        assert await refusal(ask(client)) == (409, reasons.UNREGISTERED)
        assert await refusal(client.submit(group(ticket))) == (409, reasons.UNREGISTERED)
        assert await refusal(beat(client, "wrong", other(data="other rows"))) == (409, reasons.SESSION_AWAITED)
        await client.lease(LeaseRequest(1, "lease", 1, wait_s=0.0))  # the learner is heard from again
        assert await refusal(beat(client, "wrong", other(data="other rows"))) == (403, reasons.FINGERPRINT)
        await beat(client, ticket_ids=[ticket.id])
        assert await client.submit(group(ticket)) is True
        assert queue.broker.ledger.run.vocabulary == 64


@pytest.mark.parametrize(
    "given", [other(rollout={"rollout.temperature": "0.7"}), other(chat="another"), other(data="other rows")]
)
def test_i9_without_a_learner_a_difference_is_not_final(given: Fingerprint) -> None:
    run = RunState(session=1, declared=DECLARED, data=GIVEN, data_session=1)
    with pytest.raises(Refusal, match=r"^worker w waits for the learner's session, since it differs") as refused:
        admit(run, "w", given, live=False)
    assert refused.value.reason == reasons.SESSION_AWAITED
    with pytest.raises(Refusal) as refused:
        admit(run, "w", given, live=True)
    assert refused.value.reason == reasons.FINGERPRINT
    assert not admit(run, "w", GIVEN, live=False).decision, "what does not differ works on while the learner is away"
    assert not admit(msgspec.structs.replace(run, finished=True), "w", given, live=False).decision


@pytest.mark.parametrize("then", ["as the worker", "as before"])
async def test_i9_after_a_restart_of_the_queue_the_learners_session_decides(tmp_path: Path, then: str) -> None:
    """As `slipstream up --resume` with another rollout.temperature: the worker comes before the session does."""
    async with running(store=SqliteStore(tmp_path / "queue.db")) as (_, client):
        await beat(client)
        await ask(client)
    warmer = {"rollout.temperature": "0.7"}
    async with serving(config(), SqliteStore(tmp_path / "queue.db")) as queue, QueueClient(queue.url) as client:
        for _ in range(2):
            assert await refusal(beat(client, given=other(rollout=warmer))) == (409, reasons.SESSION_AWAITED)
        assert await refusal(ask(client)) == (409, reasons.UNREGISTERED)
        status = await client.status()
        assert [wait.what for wait in status.waits if wait.who == "w"] == ["the learner's session"]
        assert status.notices == []
        changed = then == "as the worker"
        await begin(client, msgspec.structs.replace(DECLARED, rollout=warmer) if changed else DECLARED)
        if changed:
            await beat(client, given=other(rollout=warmer))
        else:
            assert await refusal(beat(client, given=other(rollout=warmer))) == (403, reasons.FINGERPRINT)
        assert [wait for wait in (await client.status()).waits if wait.who == "w"] == []


async def test_i9_a_learner_that_is_silent_for_a_leases_time_out_decides_no_more() -> None:
    async with running() as (queue, client):
        assert await refusal(beat(client, given=other(chat="another"))) == (403, reasons.FINGERPRINT)
        queue.time.now += queue.broker.config.queue.lease_timeout_s + 1
        assert await refusal(beat(client, given=other(chat="another"))) == (409, reasons.SESSION_AWAITED)


async def test_another_data_set_after_a_resume_is_a_notice() -> None:
    async with running() as (_, client):
        await beat(client)
        await begin(client)
        await beat(client, given=other(rows=5))
        assert ["5 rows, the run's has 6" in notice.text for notice in (await client.status()).notices] == [True]


def test_when_to_give_up_shapes_no_episode() -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: {"1": 1}, chat_template="")
    assert fingerprint.of(config(rollout={"give_up_after": 1}), tokenizer) == fingerprint.of(config(), tokenizer)


def test_a_store_of_before_fingerprints_loads() -> None:
    assert msgspec.json.decode(b'{"version": 3, "step": 3, "session": 1}', type=RunState).declared is None
