"""The queue over real HTTP, with the client that workers and learners use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from slipstream.deploy.servers.vllm_server import announce
from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import JSON, QueueClient, QueueRefused, RunFinished, Unreachable
from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import (
    BeginSession,
    ErrorBody,
    Group,
    LearnerProcess,
    LearnerReport,
    LeaseAck,
    LeaseReply,
    LeaseRequest,
    Notice,
    Server,
    ServerState,
    Ticket,
    TicketFailure,
    TicketRequest,
    WorkerReport,
)
from slipstream.rollout_queue.api.connection_pool import Shares
from slipstream.rollout_queue.broker import learner, lifecycle, status
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.clock import Clock
from slipstream.rollout_queue.ledger import leases
from slipstream.rollout_queue.ledger.records import Decision, Refusal, TicketRecord, TicketState
from slipstream.rollout_queue.service import fitted
from slipstream.rollout_queue.store.base import StoreError
from slipstream.rollout_queue.store.memory import MemoryStore
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit import config, group
from tests.kit.messages import SERVER
from tests.kit.queue import Served, move_server, refusal, serve_version, serving, until

MIB = 1024**2
TYPED = {"Content-Type": JSON}


@asynccontextmanager
async def running(begin: bool = True, **sections: dict[str, Any]) -> AsyncIterator[tuple[Served, QueueClient]]:
    """A queue with a client, by default with a learner session and a server at version 0."""
    async with serving(config(**sections)) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        if begin:
            await client.begin_session(BeginSession(0, 0, 100, resume=False))
            await serve_version(client, 0)
        yield queue, client


async def take(client: QueueClient, count: int = 1, worker: str = "w") -> list[Ticket]:
    return (await client.tickets(TicketRequest(worker, count, wait_s=0.0))).tickets


async def lease(client: QueueClient, count: int = 8, **fields: Any) -> LeaseReply:
    return await client.lease(
        LeaseRequest(**{"session": 1, "lease_id": "l", "max_groups": count, "wait_s": 0, **fields})
    )


async def step(client: QueueClient, ids: list[str], number: int, **fields: Any) -> None:
    await client.ack("l", LeaseAck(1, ids, step=number, version=number, **fields))


async def test_the_way_of_one_group() -> None:
    async with running() as (_, client):
        ticket = (await take(client))[0]
        assert ticket.kind == "train"
        sent = group(ticket)
        assert await client.submit(sent) is True
        reply = await lease(client)
        assert codec.encode(codec.decode(bytes(reply.groups[0]), Group)) == codec.encode(sent)
        assert reply.version_at_arrival == [0]
        await step(client, [ticket.id], 1)
        policy = await client.checkpointed(1, 1)
        assert (policy.version, policy.step, policy.checkpoint_step) == (1, 1, 1)
        status = await client.status()
        assert (status.ledger.issued, status.ledger.trained, status.ledger.outstanding) == (1, 1, 0)


async def test_no_ticket_without_learner_or_server() -> None:
    async with running(begin=False) as (_, client):
        assert await take(client) == []
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        assert await take(client) == []
        waits = [(w.who, w.what) for w in (await client.status()).waits]
        assert waits == [("w", "a server: none is serving"), (f"server {SERVER}", "its first proof: joining")]
        await serve_version(client, 0)
        assert len(await take(client, 100)) == 4
        assert (await client.status()).waits == []


async def test_a_server_that_joins_again_gets_no_tickets_out() -> None:
    async with running() as (_, client):
        await client.put_server(Server(SERVER, (await client.servers())[0].url, ServerState.JOINING))
        assert await take(client) == []


@pytest.mark.parametrize(
    ("name", "url"),
    [("a", "file:///etc/passwd"), ("a", ""), ("a\n", "http://x:1"), ("a" * 65, "http://x:1")],
)
async def test_a_server_that_nobody_could_reach_or_name_is_refused(name: str, url: str) -> None:
    async with running() as (_, client):
        before = await client.servers()
        refused = await refusal(client.put_server(Server(name, url)))
        assert (refused.status, refused.reason) == (422, "server_mismatch")
        assert await client.servers() == before


async def test_one_server_is_not_registered_twice_under_two_spellings_of_its_url() -> None:
    async with running() as (_, client):
        await client.put_server(Server("a", "http://x:1"))
        refused = await refusal(client.put_server(Server("b", "HTTP://X:1/")))
        assert "registered already, as 'a'" in str(refused)
        await client.put_server(Server("a", "http://x:1/"))
        assert [server.url for server in await client.servers() if server.name == "a"] == ["http://x:1"]


@pytest.mark.parametrize("state", [ServerState.JOINING, ServerState.DOWN])
async def test_attack_7_nobody_takes_a_server_that_serves_elsewhere(state: ServerState) -> None:
    async with running() as (_, client):
        here = (await client.servers())[0]
        refused = await refusal(client.put_server(Server(SERVER, "http://new", state)))
        assert (refused.status, refused.reason) == (422, "server_mismatch")
        assert (await client.servers()) == [here]
        await client.put_server(Server(SERVER, here.url, ServerState.DOWN))
        await client.put_server(Server(SERVER, "http://new", ServerState.JOINING))


async def test_servers_of_the_run_file_are_registered_and_travel_with_tickets_and_heartbeats() -> None:
    async with running(vllm={"servers": ["http://a:1", "http://b:2/"]}) as (_, client):
        reply = await client.tickets(TicketRequest("w", 1, wait_s=0.0))
        beat = await client.heartbeat(WorkerReport("w", []))
        assert [(s.name, s.url, s.state) for s in reply.servers] == [
            ("vllm-0", "http://a:1", ServerState.SERVING),
            ("vllm-1", "http://b:2", ServerState.JOINING),
        ]
        assert beat.servers == reply.servers


async def test_a_server_cannot_skip_its_proof() -> None:
    async with running(begin=False) as (_, client):
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        refused = await refusal(client.put_server(Server(SERVER, "http://u", ServerState.SERVING, 0), session=1))
        assert (refused.status, refused.reason) == (409, "transition_forbidden")


async def test_a_repeated_submit_counts_once() -> None:
    async with running() as (_, client):
        ticket = (await take(client))[0]
        assert [await client.submit(group(ticket)) for _ in range(3)] == [True, False, False]
        assert len((await lease(client)).groups) == 1
        await step(client, [ticket.id], 1)
        assert await client.submit(group(ticket)) is False
        await client.checkpointed(1, 1)
        assert await client.submit(group(ticket)) is False


async def test_a_late_group_of_an_expired_ticket_is_refused() -> None:
    async with running() as (queue, client):
        ticket = (await take(client))[0]
        queue.time.now += 61.0
        await queue.broker.expire()
        beat = await client.heartbeat(WorkerReport("w", [ticket.id]))
        assert beat.lost_tickets == [ticket.id]
        refused = await refusal(client.submit(group(ticket)))
        assert (refused.status, refused.reason) == (410, "ticket_ended")
        assert (await take(client))[0].id == "0.1"


async def test_a_heartbeat_keeps_tickets() -> None:
    async with running() as (queue, client):
        mine, other = await take(client, 2)
        queue.time.now += 40.0
        beat = await client.heartbeat(WorkerReport("w", [mine.id]))
        assert beat.lost_tickets == []
        queue.time.now += 40.0
        await queue.broker.expire()
        assert await client.submit(group(mine)) is True
        assert (await refusal(client.submit(group(other)))).status == 410


async def test_tickets_whose_answer_was_lost_are_given_again() -> None:
    async with running() as (_, client):
        mine = await take(client, 2, worker="a")
        other = await take(client, 1, worker="b")
        again = await client.tickets(TicketRequest("a", 1, wait_s=0.0, have=[mine[0].id]))
        assert again.tickets == [mine[1]]
        reborn = await client.tickets(TicketRequest("b", 5, wait_s=0.0, have=[]))
        assert reborn.tickets == other
        everything = await client.tickets(TicketRequest("a", 5, wait_s=0.0, have=[ticket.id for ticket in mine]))
        assert not {ticket.id for ticket in everything.tickets} & {ticket.id for ticket in [*mine, *other]}


async def test_a_ticket_that_was_never_issued_is_refused() -> None:
    async with running() as (_, client):
        refused = await refusal(client.submit(group(Ticket("7.0", 7, 2, 0, 0, 60.0))))
        assert (refused.status, refused.reason) == (410, "ticket_unknown")


async def test_whatever_fails_a_ticket_its_permit_comes_back() -> None:
    async with running(queue={"ticket_attempts": 1}) as (_, client):
        tickets = await take(client, 100)
        assert await take(client) == []
        await client.fail_ticket(tickets[0].id, TicketFailure("w", "judge"))
        await client.fail_ticket(tickets[0].id, TicketFailure("w", "judge"))
        bad = group(tickets[1])
        bad.rollouts[0].reward = float("nan")
        refused = await refusal(client.submit(bad))
        assert (refused.status, refused.reason) == (422, "reward_not_finite")
        assert "nan" in str(refused)
        await refusal(client.call("PUT", access.GROUP_OF.format(id=tickets[2].id), b"\xc1"))
        status = await client.status()
        assert status.drops == {"failed:judge": 1, "rejected:reward_not_finite": 1, "rejected:decode": 1}
        assert status.rejections == {"reward_not_finite": 1, "decode": 1}
        assert len(await take(client, 100)) == 3


async def test_another_worker_cannot_give_back_my_ticket() -> None:
    async with running() as (_, client):
        ticket = (await take(client))[0]
        await client.fail_ticket(ticket.id, TicketFailure("thief", "spite", retryable=False))
        assert await client.submit(group(ticket)) is True


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_group_that_is_too_large_is_refused_and_the_connection_lives(chunked: bool) -> None:
    async with running(queue={"max_group_bytes": MIB}) as (_, client):
        ticket = (await take(client))[0]

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield bytes(MIB // 2)

        body: Any = chunks() if chunked else bytes(4 * MIB)
        path = client.url + access.GROUP_OF.format(id=ticket.id)
        async with aiohttp.ClientSession(headers=TYPED) as session, session.put(path, data=body) as response:
            problem = codec.decode_json(await response.read(), ErrorBody)
        assert (response.status, problem.reason) == (413, "too_large")
        assert "queue.max_group_bytes" in problem.message
        status = await client.status()
        assert status.rejections == {"too_large": 1}
        assert status.groups.outstanding == 0


async def test_i3_a_full_queue_holds_producers_back_until_there_is_room() -> None:
    group_bytes = len(codec.encode(group(Ticket("0.0", 0, 2, 0, 0, 60.0))))
    limits = {"capacity_bytes": max(1024, 2 * group_bytes), "max_group_bytes": max(1024, group_bytes)}
    async with running(queue=limits) as (_, client):
        tickets = await take(client, 100)
        fitting = limits["capacity_bytes"] // group_bytes
        for ticket in tickets[:fitting]:
            await client.submit(group(ticket))
        late = group(tickets[fitting])
        refused = await refusal(client.call("PUT", access.GROUP_OF.format(id=late.ticket_id), codec.encode(late)))
        assert (refused.status, refused.reason, refused.retry_after_s) == (429, "full", 1.0)
        waiting = asyncio.create_task(client.submit(late))
        await lease(client)
        await step(client, [ticket.id for ticket in tickets[:fitting]], 1)
        assert await waiting is True
        assert (await client.status()).groups.bytes == group_bytes


async def test_a_lease_whose_answer_was_lost_is_delivered_again() -> None:
    async with running() as (_, client):
        tickets = await take(client, 3)
        for ticket in tickets:
            await client.submit(group(ticket))
        assert len((await lease(client, 2)).groups) == 2
        again = await lease(client, 2, have=[tickets[0].id])
        assert [codec.decode(bytes(g), Group).ticket_id for g in again.groups] == [tickets[1].id]
        more = await lease(client, 2, have=[tickets[0].id, tickets[1].id])
        assert [codec.decode(bytes(g), Group).ticket_id for g in more.groups] == [tickets[2].id]


async def test_an_expired_lease_returns_its_groups_and_says_so() -> None:
    async with running() as (queue, client):
        await client.submit(group((await take(client))[0]))
        await lease(client)
        queue.time.now += 100.0
        await client.renew("l", 1)
        queue.time.now += 100.0
        await queue.broker.expire()
        assert (await client.status()).groups.leased == 1
        queue.time.now += 100.0
        await queue.broker.expire()
        assert (await client.status()).groups.ready == 1
        assert (await refusal(client.renew("l", 1))).reason == "lease_lapsed"
        assert len((await lease(client, lease_id="m")).groups) == 1


async def test_released_groups_are_ready_again() -> None:
    async with running() as (_, client):
        await client.submit(group((await take(client))[0]))
        await lease(client)
        await client.release("l", 1)
        assert (await client.status()).groups.ready == 1


async def test_a_new_session_takes_over_and_fences_the_old_one() -> None:
    async with running() as (_, client):
        ticket = (await take(client))[0]
        await client.submit(group(ticket))
        await lease(client)
        waiting = asyncio.create_task(lease(client, wait_s=30.0, lease_id="other"))
        await asyncio.sleep(0.05)
        process = LearnerProcess("far-away", 7, 1.0)
        policy = await client.begin_session(BeginSession(0, 0, 100, resume=True, process=process))
        assert (policy.session, policy.version) == (2, 1)
        told = (await client.position()).learner
        assert told is not None
        assert (told.host, told.pid, told.started) == ("far-away", 7, 1.0)
        assert told.seen_s_ago is not None
        assert 0 <= told.seen_s_ago < 30
        calls: list[Any] = [
            waiting,
            lease(client),
            client.ack("l", LeaseAck(1, [ticket.id], step=1, version=1)),
            client.renew("l", 1),
            client.release("l", 1),
            client.checkpointed(1, 0),
            client.waiting(1, "groups"),
        ]
        for call in calls:
            refused = await refusal(call)
            assert (refused.status, refused.reason) == (409, "session_superseded")
        assert len((await lease(client, session=2)).groups) == 1


async def test_i5_the_runs_id_is_the_same_in_all_its_sessions_and_restarts_and_no_other_runs(tmp_path: Path) -> None:
    seen = []
    for name in ("one", "one", "two"):
        async with lifecycle.running(Broker(config(), SqliteStore(tmp_path / f"{name}.db"), Clock())):
            pass
        broker = Broker(config(), SqliteStore(tmp_path / f"{name}.db"), Clock())
        async with lifecycle.running(broker):
            seen.append(broker.position().run)
    assert seen[0] == seen[1] != seen[2]
    assert all(seen)


async def test_i5_workers_and_learner_hear_the_runs_id() -> None:
    async with running() as (_, client):
        run = (await client.begin_session(BeginSession(0, 0, 100, resume=True))).run
        assert run
        assert (await client.position()).run == run
        assert (await client.tickets(TicketRequest("w", 1, 0.0))).run in (run, "")
        assert (await client.heartbeat(WorkerReport("w", []))).run == run


async def test_a_second_fresh_start_is_told_to_resume() -> None:
    async with running() as (_, client):
        ticket = (await take(client))[0]
        await client.submit(group(ticket))
        await lease(client)
        await step(client, [ticket.id], 1)
        refused = await refusal(client.begin_session(BeginSession(0, 0, 100, resume=False)))
        assert refused.reason == "run_exists"
        assert "--resume" in str(refused)
        assert "run.name" in str(refused)


async def test_long_polls_wake_as_soon_as_there_is_something() -> None:
    """One round: the learner waits for groups, the worker for tickets, and each wakes the other."""
    async with running(learner={"groups_per_step": 1}, queue={"max_staleness": 0}) as (_, client):
        async with asyncio.timeout(5.0):
            for number in range(1, 6):
                tickets = asyncio.create_task(client.tickets(TicketRequest("w", 1, wait_s=30.0)))
                groups = asyncio.create_task(lease(client, wait_s=30.0))
                await client.submit(group((await tickets).tickets[0]))
                leased = codec.decode(bytes((await groups).groups[0]), Group)
                blocked = asyncio.create_task(client.tickets(TicketRequest("w", 1, wait_s=30.0)))
                await step(client, [leased.ticket_id], number)
                await serve_version(client, number)
                ticket = (await blocked).tickets[0]
                assert ticket.version == number
                await client.fail_ticket(ticket.id, TicketFailure("w", "test"))


async def test_no_wake_up_is_lost_under_stress() -> None:
    """Strict alternation, and waits that are far longer than the test may take: one lost wake-up fails it."""
    steps, b = 60, 3
    async with running(learner={"groups_per_step": b}, queue={"max_staleness": 0}) as (queue, client):

        async def submit(ticket: Ticket, name: str) -> None:
            try:
                await client.submit(group(ticket, worker_id=name))
            except QueueRefused:
                if not queue.broker.ledger.run.finished:
                    raise

        async def worker(name: str) -> None:
            while True:
                try:
                    reply = await client.tickets(TicketRequest(name, 2, wait_s=60.0))
                except RunFinished:
                    return
                for number, ticket in enumerate(reply.tickets):
                    for _ in range((ticket.index + number) % 3):
                        await asyncio.sleep(0)
                    if ticket.index % 7 == 0 and ticket.id.endswith(".0"):
                        await client.fail_ticket(ticket.id, TicketFailure(name, "test"))
                    else:
                        await submit(ticket, name)

        async def learner() -> None:
            for number in range(1, steps + 1):
                have: list[str] = []
                while len(have) < b:
                    reply = await lease(client, b - len(have), have=have, wait_s=60.0)
                    have += [codec.decode(bytes(data), Group).ticket_id for data in reply.groups]
                await step(client, have, number)
                await serve_version(client, number)
            await client.finish(1)

        async with asyncio.timeout(20.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(learner())
            for number in range(5):
                tasks.create_task(worker(f"w{number}"))
        counts = queue.broker.ledger.summary()
        assert counts.trained == steps * b
        assert counts.issued == counts.trained + counts.dropped + counts.reissued


async def test_drops_are_counted_and_free_their_permits() -> None:
    async with running() as (_, client):
        tickets = await take(client, 100)
        for ticket in tickets:
            await client.submit(group(ticket))
        assert await take(client) == []
        await lease(client)
        await client.ack("l", LeaseAck(1, dropped={ticket.id: reasons.OVERAGE for ticket in tickets}))
        status = await client.status()
        assert status.drops == {reasons.OVERAGE: 4}
        assert status.groups.outstanding == 0
        assert len(await take(client, 100)) == 4


async def test_ages_and_the_depth_follow_what_the_learner_meets() -> None:
    async with running(queue={"max_staleness": 2}, learner={"groups_per_step": 1}) as (_, client):
        for number in (1, 2):
            for ticket in await take(client, 100):
                await client.submit(group(ticket))
            assert await take(client) == []
            leased = codec.decode(bytes((await lease(client, 1)).groups[0]), Group)
            report = LearnerReport(
                number, 0.5, wait_s=1.0, step_s=4.0, tokens_trained=6, staleness_mean=0.5, staleness_max=number - 1
            )
            await step(client, [leased.ticket_id], number, report=report)
        status = await client.status()
        assert (status.staleness.max, status.staleness.max_ever, status.staleness.mean) == (1, 1, 0.5)
        assert (status.staleness.in_flight_mean, status.staleness.in_queue_mean) == (0.0, 0.5)
        assert status.depth_target == 2.25, "grew once; then the bound held workers back, not the depth"
        assert status.learner_wait_share == status.learner.wait_share == 0.25
        assert status.learner.reward_mean == 0.5


async def test_the_status_names_what_limits_the_run() -> None:
    async with running(learner={"groups_per_step": 1, "steps": 5}) as (queue, client):
        await client.heartbeat(WorkerReport("w", [], capacity=4, elapsed_s=10.0, waited_s=9.0))
        for number in range(1, 5):
            assert (await client.status()).limit is None, "four steps are wanted: the first waits for the start"
            (ticket,) = await take(client, 1)
            await client.submit(group(ticket))
            leased = codec.decode(bytes((await lease(client, 1)).groups[0]), Group)
            report = LearnerReport(
                number, 0.5, wait_s=0.1, step_s=1.0, tokens_trained=6, staleness_mean=0.0, staleness_max=0
            )
            await step(client, [leased.ticket_id], number, report=report)
            await move_server(client, ServerState.SERVING, number)
            queue.time.now += 1.0
        limit = (await client.status()).limit
        assert limit is not None
        assert limit.part == "learner"
        assert "the learner waits 10% of its time for groups, the workers' slots 90%" in limit.text
        await move_server(client, ServerState.DOWN, 4)
        none = (await client.status()).limit
        assert none is not None
        assert none.text == f"No vLLM server serves, so no episode continues: {SERVER} is down."
        await client.finish(1)
        assert (await client.status()).limit is None


async def test_every_step_is_on_the_live_page_however_fast_they_are() -> None:
    async with running(learner={"groups_per_step": 1, "steps": 50}) as (queue, client):
        for number in range(1, 21):
            (ticket,) = await take(client, 1)
            await client.submit(group(ticket))
            leased = codec.decode(bytes((await lease(client, 1)).groups[0]), Group)
            figures = {
                "tokens_trained": 6,
                "staleness_mean": 0.0,
                "staleness_max": 0,
                "metrics": {"reward": 0.1 * number},
            }
            report = LearnerReport(number, 0.5, wait_s=0.1, step_s=1.0, **figures)
            await step(client, [leased.ticket_id], number, report=report)
            await move_server(client, ServerState.SERVING, number)
        columns = queue.broker.history.columns.steps
        await until(lambda: 20 in columns.json().get("step", []))
        steps = columns.json()
        assert steps["step"] == list(range(1, 21))
        assert steps["reward"] == pytest.approx([0.1 * number for number in range(1, 21)])


async def test_i5_groups_of_a_server_that_failed_its_proof_are_dropped_and_refused() -> None:
    async with running() as (_, client):
        here, late = await take(client, 2)
        await client.submit(group(here, server_names=[SERVER]))
        await move_server(client, ServerState.QUARANTINED, 0, reason="probe")
        assert (await client.status()).drops == {"unverified_server": 1}
        assert (await refusal(client.submit(group(late)))).reason == "unverified_server"


async def test_a_worker_that_waits_for_tickets_is_told_at_once_of_a_server_that_leaves_service() -> None:
    async with running() as (_, client):
        await take(client, 100)
        ask = TicketRequest("w", 1, wait_s=30.0, serving=[SERVER])
        waiting = asyncio.create_task(client.tickets(ask))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await move_server(client, ServerState.STALE, reason="paused by a person")
        async with asyncio.timeout(5):
            told = [await waiting, await client.tickets(ask)]
        assert [(of.tickets, [server.state for server in of.servers]) for of in told] == [([], [ServerState.STALE])] * 2


async def test_finish_ends_the_run_for_everyone() -> None:
    async with running() as (_, client):
        tickets = await take(client, 4)
        await client.submit(group(tickets[0]))
        waiting = asyncio.create_task(client.tickets(TicketRequest("w", 1, wait_s=30.0)))
        await asyncio.sleep(0.05)
        await client.finish(1)
        with pytest.raises(RunFinished):
            await waiting
        assert (await refusal(client.submit(group(tickets[1])))).status == 410
        assert (await client.heartbeat(WorkerReport("w", []))).finished
        status = await client.status()
        assert (status.finished, status.ledger.outstanding, status.drops) == (True, 0, {"run_finished": 4})


async def test_a_stall_is_raised_and_ends_with_progress() -> None:
    async with running() as (queue, client):
        ticket = (await take(client))[0]
        queue.time.now += 59.0
        await client.heartbeat(WorkerReport("w", [ticket.id]))
        queue.time.now += 62.0
        await client.waiting(1, "groups")
        stall = (await client.status()).stall
        assert stall.stalled
        assert stall.since_s == 121.0
        assert "last heard from 62 s ago" in (stall.why or "")
        assert [(w.who, w.what) for w in (await client.status()).waits] == [("learner", "groups")]
        await client.submit(group(ticket))
        await client.waiting(1, None)
        assert (await client.status()).stall.stalled, "an arrival is not progress"
        await lease(client)
        await step(client, [ticket.id], 1)
        status = await client.status()
        assert not status.stall.stalled
        assert status.waits == []


async def test_attack_6_without_learner_or_server_the_alarm_waits_for_a_start_and_then_says_so() -> None:
    async with running(begin=False) as (queue, client):
        queue.time.now += 600.0 + 119.0
        assert not (await client.status()).stall.stalled
        queue.time.now += 1.0
        assert "no learner has begun" in ((await client.status()).stall.why or "")
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        queue.time.now += 600.0 + 120.0
        await client.waiting(1, None)
        assert "no vLLM server is serving" in ((await client.status()).stall.why or "")


async def test_attack_6_a_long_first_step_is_no_stall_while_its_lease_is_renewed() -> None:
    async with running() as (queue, client):
        tickets = await take(client, 4)
        for ticket in tickets:
            await client.submit(group(ticket, worker_id="w"))
        await lease(client)
        assert queue.broker.ledger.count(TicketState.LEASED) >= queue.broker.config.learner.groups_per_step
        for _ in range(10):
            queue.time.now += 20.0
            await client.renew("l", 1)
        assert not (await client.status()).stall.stalled
        queue.time.now += queue.broker.config.queue.lease_timeout_s
        await queue.broker.expire()
        assert "the learner was last heard from" in ((await client.status()).stall.why or "")


async def test_worker_figures() -> None:
    async with running() as (queue, client):
        for name, capacity, waited in (("a", 3, 5.0), ("b", 1, 1.0)):
            report = WorkerReport(
                name,
                [],
                capacity=capacity,
                episodes_done=8,
                eval_episodes=2,
                waited_s=waited,
                elapsed_s=10.0,
                cpu_s=0.02,
                host="h",
            )
            report.episodes_in_flight, report.episodes_generating, report.episodes_waiting = 9, 3, 1
            report.episodes_in_tools, report.episodes_in_judgement, report.full_s = 2, 1, capacity
            await client.heartbeat(report)
        queue.time.now += 5.0
        status = await client.status()
        assert [(w.worker_id, w.wait_share, w.seen_s_ago) for w in status.workers] == [("a", 0.5, 5.0), ("b", 0.1, 5.0)]
        assert status.worker_wait_share == pytest.approx(0.4)
        assert status.worker_cpu_ms_per_episode == pytest.approx(2.0)
        assert [(w.episodes_done, w.eval_episodes, w.cpu_ms_per_episode) for w in status.workers] == [(8, 2, 2.0)] * 2
        assert [w.full_share for w in status.workers] == [0.3, 0.1]
        lines = (await client.call("GET", access.METRICS)).decode().splitlines()
        at = {"generating": 6, "waiting": 2, "in_tools": 4, "in_judgement": 2, "over": 4}
        for line in (
            *(f'slipstream_episodes{{at="{place}"}} {count}.0' for place, count in at.items()),
            "slipstream_slots 4.0",
            "slipstream_worker_full_share 0.3",
        ):
            assert line in lines


async def test_a_heartbeat_s_figures_are_finite_and_its_share_at_most_one() -> None:
    async with running() as (_, client):
        for absurd in ({"waited_s": 1e308}, {"elapsed_s": -1.0}, {"tokens_sampled": -1}, {"failures": {"row": -1}}):
            assert (await refusal(client.heartbeat(WorkerReport("w", [], **absurd)))).reason == "decode"
        await client.heartbeat(WorkerReport("w", [], capacity=1, waited_s=1e12, elapsed_s=1e-300))
        status = await client.status()
        assert (status.workers[0].wait_share, status.worker_wait_share) == (1.0, 1.0)


async def test_what_is_kept_of_workers_is_bounded() -> None:
    async with running(queue={"max_workers": 64}) as (queue, client):
        failures = {f"{number:03}" + "f" * 100: number for number in range(1000)}
        notices = [Notice("tool", "t" * 1000)] * 100
        reports = [WorkerReport(f"w{number}", [], failures=failures, notices=notices) for number in range(2)]
        for report in reports:
            await client.heartbeat(report)
        kept = (await client.status()).workers
        assert [(len(worker.failures), max(map(len, worker.failures))) for worker in kept] == [(64, 80)] * 2
        assert min(kept[0].failures.values()) == 936, "the most frequent ones"
        for number in range(100):
            queue.broker.observations.worker_reports(WorkerReport(f"v{number}", []), queue.time.now)
            queue.broker.observations.workers.seen(f"u{number}", queue.time.now)
        assert len((await client.status()).workers) == 64


async def test_a_worker_beyond_the_bound_is_refused_until_one_leaves_or_is_silent() -> None:
    async with (
        running(queue={"max_workers": 2}) as (queue, client),
        QueueClient(queue.url, patience_s=0.0) as impatient,
    ):
        for name in ("a", "b", "a"):
            await client.heartbeat(WorkerReport(name, []))
        with pytest.raises(Unreachable, match=r"worker c waits until one ends; .* raise queue\.max_workers"):
            await impatient.heartbeat(WorkerReport("c", []))
        queue.time.now += 30.0
        await client.heartbeat(WorkerReport("a", []))
        connections = (await client.status()).connections
        assert (connections.refused, connections.refused_since_s, connections.refused_s_ago) == (1, 30.0, 30.0)
        queue.time.now += 30.0
        await client.heartbeat(WorkerReport("c", []))
        with pytest.raises(Unreachable, match="worker b waits"):
            await impatient.heartbeat(WorkerReport("b", []))
        await client.sign_off("c")
        await client.heartbeat(WorkerReport("b", []))
        queue.time.now += 3601.0
        assert (await client.status()).connections.refused == 0


def test_fewer_workers_are_taken_where_the_process_may_open_few_files(caplog: pytest.LogCaptureFixture) -> None:
    given = config(queue={"max_workers": 2048})
    assert fitted(given, 20_000) == (given, Shares(2048))
    assert not caplog.records
    fewer, shares = fitted(given, 1024)
    assert fewer.queue.max_workers == shares.max_workers == 101
    assert (fewer.run_dir, fewer.queue.port) == (given.run_dir, given.queue.port)
    assert "queue.max_workers = 2048 needs 12960 file descriptors and this process may open 1024" in caplog.text
    fitted(given, 256)
    with pytest.raises(ConfigError, match="needs at least 256 file descriptors and this process may open 255: raise"):
        fitted(given, 255)


async def test_rewards_beyond_the_bound_are_refused_and_those_at_it_leave_every_page_readable() -> None:
    async with running() as (_, client):
        broken = group((await take(client))[0], (1.7e308, 1.7e308))
        assert (await refusal(client.submit(broken))).reason == "reward_not_finite"
        for _ in range(4):
            tickets = await take(client, 4)
            for ticket in tickets:
                await client.submit(group(ticket, (1e30, 1e30)))
            await lease(client)
            await client.ack("l", LeaseAck(1, dropped={ticket.id: "zero_variance" for ticket in tickets}))
        status = await client.status()
        assert [notice.kind for notice in status.notices] == ["reward_not_finite"]
        assert [cause.about for cause in status.diagnosis] == ["rewards"]
        await client.call("GET", access.METRICS)


async def test_a_group_of_another_worker_is_refused_and_the_ticket_s_own_may_still_bring_its() -> None:
    async with running() as (_, client):
        ticket = (await take(client))[0]
        assert (await refusal(client.submit(group(ticket, worker_id="evil")))).reason == "worker_mismatch"
        assert await client.submit(group(ticket)) is True


async def test_what_people_are_told_never_breaks_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (queue, client):
        ticket = (await take(client))[0]

        def fault(*_: object) -> None:
            raise OverflowError("intermediate overflow in fsum")

        monkeypatch.setattr(queue.broker.observations, "decided", fault)
        assert await client.submit(group(ticket)) is True
        assert len((await lease(client)).groups) == 1


async def test_metrics_say_what_the_status_says() -> None:
    async with running() as (_, client):
        tickets = await take(client, 3)
        await client.submit(group(tickets[0]))
        await client.fail_ticket(tickets[1].id, TicketFailure("w", "row", retryable=False))
        lines = (await client.call("GET", access.METRICS)).decode().splitlines()
        assert not any("slipstream_queue_depth" in line for line in lines), "groups are not called depth"
        for line in (
            'slipstream_groups_outstanding{place="tickets"} 1.0',
            'slipstream_groups_outstanding{place="ready"} 1.0',
            'slipstream_groups_outstanding{place="leased"} 0.0',
            "slipstream_groups_limit 4.0",
            "slipstream_groups_capacity 10000.0",
            "slipstream_depth 1.0",
            "slipstream_depth_target 2.0",
            'slipstream_tickets_total{outcome="issued"} 3.0',
            'slipstream_drops_total{reason="failed:row"} 1.0',
            "slipstream_tokens_sampled_total 6.0",
            "slipstream_served_version 0.0",
            'slipstream_servers{state="serving"} 1.0',
        ):
            assert line in lines


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", access.STATUS, "GET, HEAD"),
        ("GET", access.TICKETS, "POST"),
        ("POST", access.GROUP_OF.format(id="0.0"), "PUT"),
        ("PATCH", access.WORKER_OF.format(id="w"), "DELETE, POST"),
        ("HEAD", access.LEASES, "POST"),
        ("OPTIONS", access.POLICY, "GET, HEAD, POST"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_refused_with_those_that_it_takes(
    method: str, path: str, allowed: str
) -> None:
    async with running() as (queue, _), aiohttp.ClientSession() as session:
        async with session.request(method, queue.url + path) as response:
            assert (response.status, response.headers["Allow"]) == (405, allowed)
            body = await response.read()
        assert method == "HEAD" or codec.decode_json(body, ErrorBody).reason == "http_405"


async def test_head_is_answered_as_get_is_without_the_body() -> None:
    async with running() as (queue, _), aiohttp.ClientSession() as session:
        for path in (access.HEALTH, access.READY, access.STATUS, access.METRICS, access.SERVERS, access.POLICY):
            async with session.get(queue.url + path) as got, session.head(queue.url + path) as headed:
                assert (got.status, headed.status) == (200, 200)
                assert headed.headers["Content-Type"] == got.headers["Content-Type"]
                assert await headed.read() == b""


async def test_i8_without_the_token_nothing_but_liveness_is_answered() -> None:
    async with serving(config(queue={"token": "secret"})) as queue:
        async with aiohttp.ClientSession() as session:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                for path in (access.STATUS, access.METRICS, access.READY, "/nowhere"):
                    async with session.get(queue.url + path, headers=headers) as response:
                        assert response.status == 401
                        assert codec.decode_json(await response.read(), ErrorBody).reason == "unauthorized"
            async with session.get(queue.url + access.HEALTH) as response:
                assert response.status == 200
        async with QueueClient(queue.url, token="secret") as client:
            assert (await client.position()).session == 0


@pytest.mark.parametrize(
    ("status", "reason", "method", "path", "body"),
    [
        (404, "http_404", "GET", "/nowhere", b""),
        (404, "http_404", "GET", access.STATUS + "/", b""),
        (404, "http_404", "GET", access.STATUS + "%2F", b""),
        (405, "http_405", "DELETE", access.STATUS, b""),
        (422, "decode", "POST", access.TICKETS, b"{"),
        (422, "decode", "POST", access.POLICY, b'{"do": "explode"}'),
        (422, "max_tickets", "POST", access.TICKETS, b'{"worker_id": "w", "max_tickets": 0}'),
        (422, "worker_mismatch", "POST", "/v1/workers/a", b'{"worker_id": "b", "ticket_ids": []}'),
        (422, "server_mismatch", "PUT", "/v1/servers/a", b'{"server": {"name": "b", "url": "u"}}'),
        (413, "too_large", "POST", access.TICKETS, b" " * (9 * MIB)),
    ],
)
async def test_every_refusal_is_a_problem(status: int, reason: str, method: str, path: str, body: bytes) -> None:
    async with (
        running() as (queue, _),
        aiohttp.ClientSession(headers=TYPED) as session,
        session.request(method, queue.url + path, data=body) as response,
    ):
        assert response.status == status
        assert codec.decode_json(await response.read(), ErrorBody).reason == reason


@pytest.mark.parametrize(("method", "path"), [("POST", access.LEASES), ("GET", access.STATUS)], ids=["hot", "other"])
async def test_a_fault_of_the_queues_own_is_a_problem_too(
    method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("index")

    async with running() as (queue, _), aiohttp.ClientSession(headers=TYPED) as session:
        for module, name in ((learner, "_check_session"), (status, "assemble")):
            monkeypatch.setattr(module, name, fails)
        body = codec.encode_json(LeaseRequest(1, "l", 1, wait_s=0.0)) if method == "POST" else None
        async with session.request(method, queue.url + path, data=body) as response:
            assert response.status == 500
            problem = codec.decode_json(await response.read(), ErrorBody)
            assert (problem.reason, "KeyError; see its log" in problem.message) == ("http_500", True)


class FailingStore(MemoryStore):
    """Its disk is full from the moment that `full` is set."""

    full = False

    def commit(self, *args: Any) -> None:
        if self.full:
            raise StoreError("the queue's store /x/queue.db failed: disk full; free its disk")
        super().commit(*args)


async def test_a_store_that_fails_stops_the_queue_before_it_diverges() -> None:
    store = FailingStore()
    async with serving(config(), store) as queue, QueueClient(queue.url, patience_s=0.5) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        stopped: list[str] = []
        queue.broker.on_failure = lambda: stopped.append("stop")
        store.full = True
        async with aiohttp.ClientSession(headers=TYPED) as session:
            request = codec.encode_json(TicketRequest("w", 1))
            async with session.post(queue.url + access.TICKETS, data=request) as response:
                assert response.status == 503
                assert "disk full" in codec.decode_json(await response.read(), ErrorBody).message
            store.full = False
            for path in (access.READY, access.STATUS):
                async with session.get(queue.url + path) as response:
                    assert response.status == 503
            async with session.get(queue.url + access.HEALTH) as response:
                assert response.status == 200
        assert stopped == ["stop"]
        assert queue.broker.ledger.issued == 0


async def test_attack_1_a_number_that_the_store_cannot_hold_is_refused_and_the_queue_goes_on() -> None:
    async with running() as (queue, client):
        beyond = TicketRecord(index=0, attempt=0, serial=0, worker_id="w", version=2**63)
        with pytest.raises(Refusal) as refused:
            await queue.broker.apply(Decision((msgspec.structs.replace(beyond, version=1), beyond)))
        assert refused.value.reason == reasons.OUT_OF_RANGE
        assert queue.broker.ledger.issued == 0
        assert queue.broker.store.load().live == []
        assert [ticket.id for ticket in await take(client)] == ["0.0"]


async def test_a_worker_that_hung_up_is_given_no_ticket() -> None:
    async with running() as (queue, client):
        await take(client, 100)
        async with aiohttp.ClientSession(headers=TYPED) as session:
            body = codec.encode_json(TicketRequest("gone", 1, wait_s=30.0))
            timeout = aiohttp.ClientTimeout(total=0.1)
            with pytest.raises(TimeoutError):
                await session.post(queue.url + access.TICKETS, data=body, timeout=timeout)
        await asyncio.sleep(0.05)
        await client.fail_ticket("0.0", TicketFailure("w", "test"))
        assert [ticket.id for ticket in await take(client)] == ["0.1"]


async def test_a_superseded_learner_neither_finishes_the_run_nor_proves_servers() -> None:
    async with running() as (_, client):
        await client.begin_session(BeginSession(0, 0, 100, resume=True))
        here = (await client.servers())[0]
        for call in (
            client.finish(1),
            client.finish(0),
            client.put_server(Server(SERVER, here.url, ServerState.SERVING, 9), 1),
            client.put_server(Server(SERVER, here.url, ServerState.DOWN), 1),
        ):
            refused = await refusal(call)
            assert (refused.status, refused.reason) == (409, "session_superseded")
        assert not (await client.position()).finished
        assert (await client.servers())[0] == here


@pytest.mark.parametrize("state", list(ServerState))
async def test_without_a_session_a_server_can_only_join_or_be_down(state: ServerState) -> None:
    async with running() as (_, client):
        server = Server(SERVER, (await client.servers())[0].url, state, 0)
        if state in (ServerState.JOINING, ServerState.DOWN):
            assert (await client.put_server(server)).state is state
        else:
            assert (await refusal(client.put_server(server))).reason == "session_superseded"


BEYOND = 2**63


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (access.POLICY, {"do": "begin", "step": -5, "version": 0, "total_steps": 9, "resume": True}),
        (access.POLICY, {"do": "begin", "step": 0, "version": -1, "total_steps": 9, "resume": True}),
        (access.POLICY, {"do": "begin", "step": 0, "version": 0, "total_steps": 0, "resume": True}),
        (access.POLICY, {"do": "begin", "step": 0, "version": 0, "total_steps": BEYOND, "resume": True}),
        (access.POLICY, {"do": "begin", "step": BEYOND, "version": 0, "total_steps": 9, "resume": True}),
        (access.POLICY, {"do": "begin", "step": 2**70, "version": 0, "total_steps": 9, "resume": True}),
        (access.POLICY, {"do": "begin", "step": 0, "version": BEYOND, "total_steps": 9, "resume": True}),
        (access.POLICY, {"do": "checkpointed", "session": 1, "step": -1}),
        (access.POLICY, {"do": "checkpointed", "session": 1, "step": 2**70}),
        ("/v1/leases/l/ack", {"session": 1, "trained": ["0.0"], "step": BEYOND, "version": 1}),
        ("/v1/leases/l/ack", {"session": 1, "trained": ["0.0"], "step": 1, "version": 2**70}),
        ("/v1/servers/vllm-0", {"session": 1, "server": {"name": "vllm-0", "url": "u", "version": 2**70}}),
        ("/v1/servers/vllm-0", {"session": 1, "server": {"name": "vllm-0", "url": "u", "version": -1}}),
    ],
)
async def test_a_number_that_the_store_cannot_hold_is_refused_not_a_500(path: str, body: dict[str, Any]) -> None:
    async with running() as (queue, client), aiohttp.ClientSession() as session:
        method = "PUT" if "servers" in path else "POST"
        async with session.request(method, queue.url + path, json=body) as response:
            assert (response.status, codec.decode_json(await response.read(), ErrorBody).reason) == (422, "decode")
        assert (await client.position()).session == 1


async def test_the_learner_hears_that_a_leased_group_is_tainted_before_it_trains_it() -> None:
    async with running() as (_, client):
        first, second = await take(client, 2)
        await client.submit(group(first))
        await client.submit(group(second))
        assert len((await lease(client)).groups) == 2
        assert await client.renew("l", 1, [first.id, second.id]) == {}
        await move_server(client, ServerState.QUARANTINED, 0, reason="probe")
        assert await client.renew("l", 1, [first.id]) == {first.id: "unverified_server"}
        again = await lease(client, have=[first.id])
        assert (again.groups, again.revoked) == ([], {first.id: "unverified_server"})
        assert (await client.status()).drops == {"unverified_server": 1}, "the one whose answer was lost"
        await step(client, [first.id], 1)
        status = await client.status()
        assert (status.ledger.trained, status.ledger.dropped, status.ledger.issued) == (1, 1, 2)


@pytest.mark.parametrize(("name", "reason"), [("", "span_server_unknown"), ("ghost", "span_server_unknown")])
async def test_the_door_takes_no_group_of_an_unknown_server(name: str, reason: str) -> None:
    async with running() as (_, client):
        ticket = (await take(client))[0]
        refused = await refusal(client.submit(group(ticket, server_names=[name])))
        assert (refused.status, refused.reason) == (422, reason)


async def test_status_shows_what_is_kept_for_a_resume_beside_what_waits() -> None:
    async with running() as (_, client):
        tickets = await take(client, 2)
        for ticket in tickets:
            await client.submit(group(ticket))
        size = (await client.status()).groups.bytes
        await lease(client)
        await step(client, [ticket.id for ticket in tickets], 1)
        groups = (await client.status()).groups
        assert (groups.bytes, groups.kept_bytes) == (0, size)
        await client.checkpointed(1, 1)
        assert (await client.status()).groups.kept_bytes == 0


async def test_a_late_group_of_a_ticket_that_is_a_sum_by_now_is_ended_not_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases.checkpointed, "__defaults__", (0,))
    async with running(learner={"keep_checkpoints": 1, "groups_per_step": 1}) as (queue, client):
        ticket = (await take(client))[0]
        await client.submit(group(ticket))
        await lease(client)
        await step(client, [ticket.id], 1)
        await client.checkpointed(1, 1)
        await client.checkpointed(1, 1)
        assert queue.broker.ledger.run.pruned_below == 1
        refused = await refusal(client.submit(group(ticket)))
        assert (refused.status, refused.reason) == (410, "ticket_ended")
        status = await client.status()
        assert (status.ledger.issued, status.ledger.trained, status.tokens_sampled) == (1, 1, 6)


async def test_a_lapsed_lease_that_is_leased_again_delivers_only_what_is_new_and_its_renewals_speak() -> None:
    async with running() as (queue, client):
        first, second = await take(client, 2)
        await client.submit(group(first))
        await client.submit(group(second))
        assert len((await lease(client)).groups) == 2
        queue.time.now += 121.0
        await queue.broker.expire()
        await lease(client, 0, lease_id="other", have=[second.id])
        third = (await take(client))[0]
        await client.submit(group(third))
        again = await lease(client, have=[first.id, second.id])
        assert [codec.decode(bytes(item), Group).ticket_id for item in again.groups] == [third.id]
        assert again.revoked == {second.id: "lease_lapsed"}
        held = [first.id, second.id, third.id]
        assert await client.renew("l", 1, held) == {second.id: "lease_lapsed"}


@pytest.mark.parametrize("steps", [1, 9])
async def test_a_finished_run_is_open_again_where_more_steps_are_asked_for(tmp_path: Path, steps: int) -> None:
    """From the queue's start on: a worker that is up before the learner would end."""
    store, once, again = tmp_path / "queue.db", config(learner={"steps": 1}), config(learner={"steps": steps})
    async with serving(once, SqliteStore(store)) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 1, resume=False))
        await serve_version(client, 0)
        ticket = (await client.tickets(TicketRequest("w", 1, wait_s=0.0))).tickets[0]
        await client.submit(group(ticket))
        await client.lease(LeaseRequest(1, "l", 1, wait_s=0.0))
        await client.ack("l", LeaseAck(1, [ticket.id], step=1, version=1))
        await client.finish(1)
    async with serving(again, SqliteStore(store)) as queue, QueueClient(queue.url) as client:
        assert (await client.heartbeat(WorkerReport("w", []))).finished == (steps == 1)


# A server that leaves.


async def says(client: QueueClient, worker: str = "w", **fields: Any) -> list[Server]:
    return (await client.heartbeat(WorkerReport(worker, [], **fields))).servers


async def test_a_server_that_leaves_is_gone_once_every_worker_has_said_that_nothing_runs_there() -> None:
    async with running() as (_, client):
        await says(client, "w")
        await says(client, "x")
        assert [server.state for server in await client.remove_server(SERVER)] == [ServerState.DRAINING]
        assert not await take(client)
        waits = [wait.what for wait in (await client.status()).waits if wait.who == f"server {SERVER}"]
        assert waits == ["the end of its requests of w, x: draining (it was asked to leave)"]
        await says(client, "w", draining={SERVER: 2})
        await says(client, "x", draining={SERVER: 0})
        assert [server.state for server in await client.servers()] == [ServerState.DRAINING]
        with pytest.raises(QueueRefused, match="is draining and cannot become joining"):
            await client.put_server(Server(SERVER, "http://127.0.0.1:8100"))
        await says(client, "w", draining={SERVER: 0})
        assert await client.servers() == []
        assert await client.remove_server(SERVER) == []
        with pytest.raises(QueueRefused, match="not registered"):
            await client.remove_server("vllm-7")


async def test_a_worker_that_signed_off_holds_up_no_server_that_leaves() -> None:
    """It was waited for until its last heartbeat was a minute old."""
    async with running() as (_, client):
        await take(client, 100)
        await says(client, "w", episodes_in_flight=2, waiting_for_servers=1)
        await says(client, "x")
        polling = asyncio.create_task(client.tickets(TicketRequest("w", 1, wait_s=30.0)))
        await asyncio.sleep(0.05)
        await client.sign_off("w")
        await client.remove_server(SERVER)
        await asyncio.sleep(0.05)
        waits = {wait.who: wait.what for wait in (await client.status()).waits}
        assert waits.pop(f"server {SERVER}") == "the end of its requests of x: draining (it was asked to leave)"
        assert "w's episodes" not in waits
        await client.sign_off("x")
        assert await client.servers() == []
        assert [worker.episodes_in_flight for worker in (await client.status()).workers] == [0, 0]
        await client.sign_off("x")  # a repeat, as after a lost answer
        polling.cancel()


async def test_a_server_that_leaves_is_gone_after_its_time_whoever_is_silent() -> None:
    async with running(vllm={"drain_timeout_s": 30.0}) as (queue, client):
        await says(client, "w")
        await client.remove_server(SERVER)
        await queue.broker.remove_drained()
        assert len(await client.servers()) == 1
        queue.time.now += 31.0
        await queue.broker.remove_drained()
        assert await client.servers() == []


async def test_a_server_may_be_removed_at_once_and_what_it_sampled_stays_good() -> None:
    async with running() as (_, client):
        (ticket,) = await take(client)
        await says(client, "w")
        assert await client.remove_server(SERVER, now=True) == []
        await client.submit(group(ticket))
        assert len((await lease(client)).groups) == 1


async def test_a_server_that_leaves_is_gone_only_once_the_version_on_its_way_is_judged() -> None:
    """It was gone, and what it had sampled by a version that was proven a moment later was refused."""
    async with running() as (queue, client):
        await says(client, "w")
        await lease(client)
        queue.broker.ledger.run = msgspec.structs.replace(queue.broker.ledger.run, version=1)
        assert [server.state for server in await client.remove_server(SERVER)] == [ServerState.DRAINING]
        await says(client, "w", draining={SERVER: 0})
        assert [server.state for server in await client.servers()] == [ServerState.DRAINING]
        (waits,) = [wait.what for wait in (await client.status()).waits if wait.who == f"server {SERVER}"]
        assert waits.startswith("the learner to verify the version that is on its way to it")
        told = await client.put_server(Server(SERVER, "http://127.0.0.1:8100", ServerState.SERVING, 1), 1)
        assert told.state is ServerState.DRAINING
        await queue.broker.remove_drained()
        assert await client.servers() == []


async def test_a_run_file_s_server_that_was_removed_stays_away_when_the_queue_restarts_until_it_is_started_again(
    tmp_path: Path,
) -> None:
    settings = config(vllm={"count": 2})
    for removes in (True, False):
        store = SqliteStore(tmp_path / "store")
        async with serving(settings, store) as queue, QueueClient(queue.url, patience_s=5.0) as client:
            if removes:
                await client.remove_server("vllm-1", now=True)
            assert [server.name for server in await client.servers()] == ["vllm-0"]
    async with serving(settings, SqliteStore(tmp_path / "store")) as queue:
        await announce(settings.model_copy(update={"queue": settings.queue.model_copy(update=_place(queue.url))}), 1)
        async with QueueClient(queue.url, patience_s=5.0) as client:
            assert sorted(server.name for server in await client.servers()) == ["vllm-0", "vllm-1"]


def _place(url: str) -> dict[str, Any]:
    return {"host": urlsplit(url).hostname, "port": urlsplit(url).port}


async def test_one_server_is_not_registered_under_two_names() -> None:
    async with running() as (_, client):
        url = (await client.servers())[0].url
        with pytest.raises(QueueRefused, match=f"registered already, as '{SERVER}'"):
            await client.put_server(Server("twin", url))


async def test_i5_a_proof_that_comes_wakes_a_lease_that_waits() -> None:
    async with running() as (_, client):
        ids = [ticket.id for ticket in await take(client, 2)]
        for ticket_id in ids:
            await client.submit(group(ticket_id, index=int(ticket_id.split(".")[0])))
        await step(client, [codec.decode(bytes(of), Group).ticket_id for of in (await lease(client)).groups], 1)
        (ticket,) = await take(client)
        await client.submit(group(ticket, versions=(None, None, 1, 1, 1)))  # swapped, and not proven yet
        assert (await lease(client)).groups == []
        waits = [wait.what for wait in (await client.status()).waits if wait.who == "groups in the queue"]
        assert waits == [f"the proof of the weights that {SERVER} sampled them with"]
        waiting = asyncio.create_task(lease(client, wait_s=20.0))
        await asyncio.sleep(0.05)
        await serve_version(client, 1)
        assert len((await asyncio.wait_for(waiting, 5)).groups) == 1


async def test_the_status_says_how_far_behind_a_server_is_and_since_when() -> None:
    async with running() as (queue, client):
        await move_server(client, ServerState.STALE, reason="2 versions behind vllm-1")
        queue.time.now += 7.0
        (server,) = (await client.status()).servers
        assert (server.state, server.version, server.lag, server.since_s) == (ServerState.STALE, 0, 0, 7.0)
        assert server.waits_for == "newer weights"
        assert server.reason == "2 versions behind vllm-1"
