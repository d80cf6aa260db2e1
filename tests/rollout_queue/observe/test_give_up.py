"""When the first groups all fail, the run ends with the failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import QueueClient, QueueError, QueueRefused
from slipstream.protocol.messages import BeginSession, LeaseRequest, Notice, TicketFailure, TicketRequest, WorkerReport
from slipstream.protocol.status import EvaluationRequest
from slipstream.rollout_queue.ledger.records import Refusal, TicketRecord
from slipstream.rollout_queue.observe.early_failure import EarlyFailureCheck
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit import config, group
from tests.kit.queue import serve_version, serving

REWARD = reasons.failed(reasons.REWARD)


def trial(after: int = 3) -> EarlyFailureCheck:
    return EarlyFailureCheck(config(rollout={"give_up_after": after}))


def ticket(index: int, worker: str = "w", attempt: int = 0) -> TicketRecord:
    return TicketRecord(index=index, attempt=attempt, serial=index, worker_id=worker, version=0)


def test_the_first_failures_end_the_run_with_the_most_frequent_one() -> None:
    judged = trial(3)
    ends = ((REWARD, "length 1, not 2"), ("failed:row", "no row"), (REWARD, "again"))
    told = [judged.failed(ticket(row), reason, detail, []) for row, (reason, detail) in enumerate(ends)]
    assert told == [False, False, True]
    with pytest.raises(Refusal, match=r"first 3 groups failed, 2 of them for failed:reward: length 1, not 2. Fix it"):
        judged.check_not_given_up()
    assert not judged.failed(ticket(3), REWARD, "told once", [])
    judged.begin(passed=False)
    judged.check_not_given_up()


def test_a_workers_notice_tells_more_than_the_tickets_reason() -> None:
    judged = trial(1)
    judged.add_text("reward", "accuracy: ValueError in task.py:12")
    judged.failed(ticket(0), reasons.failed(reasons.NO_REWARD), "no rollout has a reward", [])
    assert "accuracy: ValueError in task.py:12" in (judged.gave_up or "")


@pytest.mark.parametrize(
    ("reason", "where"),
    [
        (reasons.REWARD, "in the task"),
        (reasons.ROW, "in the task"),
        (reasons.BAD_LOGPROBS, "at the vLLM server"),
        (reasons.INTERNAL, "in the run file"),
    ],
)
def test_the_task_is_blamed_only_for_what_is_its_own(reason: str, where: str) -> None:
    judged = trial(1)
    judged.failed(ticket(0), reasons.failed(reason), "why", [])
    assert f"Fix it {where}" in (judged.gave_up or "")


def test_one_success_is_enough() -> None:
    judged = trial(1)
    judged.succeeded()
    assert not judged.failed(ticket(0), REWARD, "", [])


def test_attack_2_a_worker_with_slow_episodes_is_waited_for() -> None:
    judged = trial(2)
    out = [ticket(row, "good") for row in range(8)]
    assert not any(judged.failed(ticket(row, "bad"), REWARD, "", out) for row in range(8, 40))
    assert not judged.failed(ticket(0, "good"), reasons.failed(reasons.SERVER), "", out[1:])
    assert judged.failed(ticket(1, "good"), REWARD, "", out[2:])
    assert "the first 2 groups failed" in (judged.gave_up or "")


def test_attack_2_a_success_that_comes_late_takes_it_back() -> None:
    judged = trial(1)
    assert judged.failed(ticket(0), REWARD, "", [])
    judged.succeeded()
    judged.check_not_given_up()


def test_attack_2_rows_count_not_attempts() -> None:
    judged = trial(2)
    assert not any(judged.failed(ticket(0, attempt=attempt), REWARD, "", []) for attempt in range(3))
    assert judged.failed(ticket(1), REWARD, "", [])


@pytest.mark.parametrize("body", [b"garbage", codec.encode(group("7.0"))])
async def test_attack_2_bodies_that_no_worker_of_ours_sends_end_no_run(body: bytes) -> None:
    async with serving(config(rollout={"give_up_after": 1})) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        for issued in (await client.tickets(TicketRequest("w", 3, wait_s=0.0))).tickets:
            with pytest.raises(QueueRefused):
                await client.call("PUT", access.GROUP_OF.format(id=issued.id), body)
        assert (await client.status()).gave_up is None


async def test_attack_2_a_run_that_had_a_group_goes_on_after_a_restart_and_a_resume(tmp_path: Path) -> None:
    settings = config(rollout={"give_up_after": 1})
    async with serving(settings, SqliteStore(tmp_path / "q.db")) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        good, bad = (await client.tickets(TicketRequest("w", 2, wait_s=0.0))).tickets
        await client.submit(group(good, worker_id="w"))
    async with serving(settings, SqliteStore(tmp_path / "q.db")) as queue, QueueClient(queue.url) as client:
        await client.fail_ticket(bad.id, TicketFailure("w", reasons.REWARD, "boom"))
        assert (await client.status()).gave_up is None
        await client.begin_session(BeginSession(0, 0, 100, resume=True))
        again = (await client.tickets(TicketRequest("w", 1, wait_s=0.0))).tickets[0]
        await client.fail_ticket(again.id, TicketFailure("w", reasons.REWARD, "boom"))
        assert (await client.status()).gave_up is None


@pytest.mark.parametrize("reason", [reasons.SERVER, reasons.WORKER_STOPPED, reasons.UNVERIFIED_SERVER])
def test_what_a_run_survives_does_not_count(reason: str) -> None:
    assert not trial(1).failed(ticket(0), reasons.failed(reason), "", [])


def test_0_never_gives_up() -> None:
    judged = trial(0)
    assert not any(judged.failed(ticket(row), REWARD, "", []) for row in range(100))


async def test_everyone_who_waits_is_told_and_a_new_session_counts_anew() -> None:
    settings = config(rollout={"give_up_after": 2}, eval={"at_end": True})
    async with serving(settings) as queue, QueueClient(queue.url) as client:
        session = (await client.begin_session(BeginSession(0, 0, 100, resume=False))).session
        await client.evaluate(EvaluationRequest(session, 5, 5, None, 1, None, timeout_s=1000.0))
        await serve_version(client, 0)
        await client.heartbeat(WorkerReport("w", [], notices=[Notice("reward", "accuracy: boom in task.py:3")]))
        tickets = (await client.tickets(TicketRequest("w", 100, wait_s=0.0))).tickets
        await client.fail_ticket(tickets[0].id, TicketFailure("w", reasons.REWARD, "boom"))
        await client.tickets(TicketRequest("w", 100, wait_s=0.0))
        leasing = asyncio.create_task(client.lease(LeaseRequest(1, "l", 2, wait_s=30.0)))
        asking = asyncio.create_task(client.call("POST", access.TICKETS, TicketRequest("v", 1, wait_s=30.0)))
        evaluating = asyncio.create_task(client.evaluations(wait_s=30.0))
        await asyncio.sleep(0.05)
        bad = group(tickets[1])
        bad.rollouts[0].reward = float("nan")
        with pytest.raises(QueueRefused):
            await client.submit(bad)
        async with asyncio.timeout(5.0):
            for waiting in (leasing, asking, evaluating):
                with pytest.raises(QueueError, match="the first 2 groups failed"):
                    await waiting
        with pytest.raises(QueueError, match="the first 2 groups failed"):
            await client.evaluations(wait_s=30.0)
        status = await client.status()
        assert "accuracy: boom in task.py:3" in (status.gave_up or "")
        assert b"slipstream_gave_up 1.0" in await client.call("GET", access.METRICS)
        await client.begin_session(BeginSession(0, 0, 100, resume=True))
        assert (await client.status()).gave_up is None
        await client.lease(LeaseRequest(2, "m", 2, wait_s=0.0))
