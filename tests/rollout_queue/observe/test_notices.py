"""What a person is told, each thing once: first failures, servers that fail; and the alarm that goes with it."""

from __future__ import annotations

import pytest

from slipstream.protocol import access, reasons
from slipstream.protocol.client import QueueClient, QueueRefused
from slipstream.protocol.messages import (
    BeginSession,
    LearnerReport,
    LeaseAck,
    LeaseRequest,
    Notice,
    Server,
    ServerState,
    TicketRequest,
    WorkerReport,
)
from slipstream.rollout_queue.observe.notices import AGAIN_AFTER_S, MAX_CHARACTERS, MAX_NOTICES, Notices
from tests.kit import config, group
from tests.kit.messages import SERVER
from tests.kit.queue import Served, serve_version, serving

HOUR = 3600.0


def test_a_notice_is_said_once_whatever_its_numbers() -> None:
    notices = Notices()
    notices.say("tool", "row 7 failed", 10.0, "w")
    notices.say("tool", "row 11 failed", 20.0, "v")
    notices.say("reward", "row 11 failed", 20.0)
    assert [(n.id, n.kind, n.text, n.who, n.since_s) for n in notices.list(30.0)] == [
        (1, "tool", "row 7 failed", "w", 20.0),
        (2, "reward", "row 11 failed", None, 10.0),
    ]


def test_what_comes_back_after_a_while_is_the_newest_notice_and_counted() -> None:
    """Told again by one worker, or by the next process of its name; heartbeats repeat what they have told."""
    notices, failed = Notices(), "tool search failed"
    turns = [
        (failed, "1", 0.0),
        (f"{failed}; again, after 2 min", "1", 120.0),  # another text, and soon enough to be another thing
        (failed, "2", 200.0),  # a restart in between is no news
        (failed, "3", 200.0 + AGAIN_AFTER_S),
        (f"{failed}; again, after 9 min", "3", 1000.0),
    ]
    for text, life, at in turns:
        for second in range(3):
            notices.say("tool", text, at + second, "w", life=life)
            notices.say("tool", text, at + second, "v", life=life)
    assert [(of.text, 2000.0 - of.since_s, of.count, of.times) for of in notices.list(2000.0)] == [
        (failed, 200.0 + AGAIN_AFTER_S, 2, 2),
        (f"{failed}; again, after 9 min", 1000.0, 2, 2),
    ]
    assert [of.first_s for of in notices.list(2000.0)] == [2000.0, 1880.0]


def test_a_server_that_fails_again_and_again_is_one_notice_that_counts() -> None:
    notices = Notices()
    for turn in range(4):
        notices.say("server", f"vllm-0 is down: reason {chr(97 + turn)}", turn * 60.0, key="vllm-0 down", again=True)
    (one,) = notices.list(180.0)
    assert (one.id, one.text, one.times, one.first_s) == (1, "vllm-0 is down: reason a", 4, 180.0)
    notices.say("server", "vllm-0 is down: reason z", 180.0 + AGAIN_AFTER_S, key="vllm-0 down", again=True)
    (one,) = notices.list(180.0 + AGAIN_AFTER_S)
    assert (one.id, one.text, one.times, one.since_s) == (2, "vllm-0 is down: reason z", 5, 0.0)


def test_what_many_workers_say_is_one_notice_that_counts_them() -> None:
    notices = Notices()
    for again in range(3):
        for number in range(2000):
            who = f"node-{chr(97 + number % 26)}-{number}"
            notices.say("tool", f"row {number} failed at {who}: no route to host", again * 10.0, who)
            notices.say("tool", "another", again * 10.0, "w")
    first, other = notices.list(30.0)
    assert (first.text, first.who, first.count, first.since_s) == (
        *("row 0 failed at node-a-0: no route to host", "node-a-0", 2000, 30.0),
    )
    assert (other.text, other.count) == ("another", 1)


def test_notices_are_bounded_and_their_ids_grow() -> None:
    notices = Notices()
    for number in range(5000):
        notices.say("tool", "x" * number + "y" * 10_000, 0.0)
    kept = notices.list(0.0)
    assert len(kept) == MAX_NOTICES
    assert {len(notice.text) for notice in kept} <= {MAX_CHARACTERS}
    for letters in range(100):
        notices.say("tool", chr(0x4E00 + letters), 0.0)
    assert [n.id for n in notices.list(0.0)] == list(range(notices.count - MAX_NOTICES + 1, notices.count + 1))
    assert len(notices._known) <= 1024


async def begin(client: QueueClient) -> None:
    await client.begin_session(BeginSession(0, 0, 100, resume=False))
    await serve_version(client, 0)


async def drop_all(queue: Served, client: QueueClient, groups: int, over_s: float) -> None:
    """Groups that come in all the time, none with variance, while everyone is alive."""
    ended = 0
    while ended < groups:
        tickets = (await client.tickets(TicketRequest("w", 4, wait_s=0.0))).tickets
        for ticket in tickets:
            await client.submit(group(ticket, rewards=(0.0, 0.0)))
        await client.lease(LeaseRequest(1, "l", 4, wait_s=0.0))
        await client.ack("l", LeaseAck(1, dropped={ticket.id: reasons.ZERO_VARIANCE for ticket in tickets}))
        ended += len(tickets)
        queue.time.now += over_s * len(tickets) / groups


async def test_600_groups_dropped_over_ten_hours_raise_the_alarm_with_the_cause() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await begin(client)
        await drop_all(queue, client, groups=600, over_s=10 * HOUR)
        await client.heartbeat(WorkerReport("w", []))
        await client.waiting(1, "groups")
        status = await client.status()
        assert status.stall.stalled
        assert status.stall.since_s == pytest.approx(10 * HOUR)
        for part in ("600 of the 600 groups", "zero_variance", "all are 0", "the task may be too hard"):
            assert part in (status.stall.why or "")
        (cause,) = status.diagnosis
        assert (cause.about, cause.severity) == ("rewards", "bad")
        assert "600 groups in a row" in cause.text


async def test_an_early_429_is_not_the_cause_for_ever() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await begin(client)
        queue.broker.observations.progress.found_full()
        ticket = (await client.tickets(TicketRequest("w", 1, wait_s=0.0))).tickets[0]
        queue.time.now += 121.0
        await client.heartbeat(WorkerReport("w", [ticket.id]))
        await client.waiting(1, "groups")
        assert "queue.capacity_bytes" in ((await client.status()).stall.why or "")
        await client.submit(group(ticket))
        await client.lease(LeaseRequest(1, "l", 1, wait_s=0.0))
        await client.ack("l", LeaseAck(1, [ticket.id], step=1, version=1))
        queue.time.now += 121.0
        await client.heartbeat(WorkerReport("w", []))
        await client.waiting(1, "groups")
        assert "queue.capacity_bytes" not in ((await client.status()).stall.why or "capacity")


async def test_loading_for_hours_raises_no_alarm_and_is_not_silent() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        queue.time.now += HOUR
        waits = [(wait.who, wait.what, wait.since_s) for wait in (await client.status()).waits]
        assert waits == [
            ("the queue", "a learner", HOUR),
            ("the queue", "a worker", HOUR),
            (f"server {SERVER}", "its first proof: joining", HOUR),
        ]
        await begin(client)
        await client.heartbeat(WorkerReport("w", []))
        for _ in range(6):
            await client.waiting(1, "loading the checkpoint")
            queue.time.now += HOUR / 6
        assert not (await client.status()).stall.stalled
        await client.waiting(1, None)
        queue.time.now += 119.0
        assert not (await client.status()).stall.stalled
        queue.time.now += 1.0
        assert (await client.status()).stall.stalled


async def test_five_median_steps_of_the_learner_are_waited_for() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await begin(client)
        ticket = (await client.tickets(TicketRequest("w", 1, wait_s=0.0))).tickets[0]
        await client.submit(group(ticket))
        await client.lease(LeaseRequest(1, "l", 1, wait_s=0.0))
        report = LearnerReport(1, 0.5, 1.0, 100.0, 6, 0.0, 0, metrics={"reward": 0.5, "kl": 0.25})
        await client.ack("l", LeaseAck(1, [ticket.id], step=1, version=1, report=report))
        queue.time.now += 499.0
        assert not (await client.status()).stall.stalled
        queue.time.now += 1.0
        stall = (await client.status()).stall
        assert (stall.stalled, stall.since_s, stall.after_s) == (True, 500.0, 500.0)
        metrics = (await client.call("GET", access.METRICS)).decode().splitlines()
        for line in (
            'slipstream_train{name="reward"} 0.5',
            'slipstream_train{name="kl"} 0.25',
            "slipstream_stalled 1.0",
        ):
            assert line in metrics


async def test_notices_of_workers_and_failing_servers_are_told_once() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await begin(client)
        for row in range(3):
            notice = Notice("reward", f"accuracy: ValueError on row {row} in task.py:12")
            await client.heartbeat(WorkerReport(f"w{row}", [], notices=[notice]))
        url = (await client.servers())[0].url
        await client.put_server(Server(SERVER, url, ServerState.DOWN, reason="connection refused"))
        status = await client.status()
        assert [(n.kind, n.who, n.text) for n in status.notices] == [
            ("reward", "w0", "accuracy: ValueError on row 0 in task.py:12"),
            ("server", None, f"vLLM server {SERVER} at {url} is down: connection refused"),
        ]
        assert (f"server {SERVER}", "an answer that the run can use, or a restart: down (connection refused)") in [
            (w.who, w.what) for w in status.waits
        ]
        assert queue.broker.observations.notices.count == 2


async def test_the_first_group_that_the_door_refuses_for_a_reason_is_told() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await begin(client)
        for ticket in (await client.tickets(TicketRequest("w", 3, wait_s=0.0))).tickets:
            bad = group(ticket)
            bad.rollouts[0].reward = float("nan")
            with pytest.raises(QueueRefused):
                await client.submit(bad)
        notices = (await client.status()).notices
        assert [(n.kind, n.who, n.text) for n in notices] == [("reward_not_finite", "w", "rollout 0: reward is nan")]


def test_a_notice_holds_no_escape_sequence() -> None:
    notices = Notices()
    notices.say("tool", "\x1b[2J\x07bad\nvalue", 0.0, "w\x1b[2J")
    assert [(notice.text, notice.who) for notice in notices.list(0.0)] == [(" [2J bad\nvalue", "w [2J")]


async def test_i7_a_run_that_no_worker_joins_raises_the_alarm() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        queue.time.now += 121.0
        await client.waiting(1, "groups")
        stall = (await client.status()).stall
        assert stall.stalled
        assert "workers were never heard from" in (stall.why or "")
