"""Evaluations over real HTTP, as workers and the learner meet them; `test_evaluation_machine` has the orders of
events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from slipstream.protocol.client import QueueClient
from slipstream.protocol.messages import (
    BeginSession,
    LeaseAck,
    LeaseRequest,
    Rollout,
    Server,
    ServerState,
    Ticket,
    TicketFailure,
    TicketRequest,
    WorkerReport,
)
from slipstream.protocol.status import Evaluation, EvaluationRequest, evaluation_metrics
from slipstream.rollout_queue.ledger.evaluations import MAX_ENDED, MAX_OPEN
from slipstream.rollout_queue.ledger.records import Decision
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit import config, group
from tests.kit.broker import DECLARED, FOUND
from tests.kit.messages import SERVER, group_of_roles, segment
from tests.kit.queue import Served, move_server, refusal, serve_version, serving


@asynccontextmanager
async def running(
    store: SqliteStore | None = None, steps: int = 100, **sections: dict[str, Any]
) -> AsyncIterator[tuple[Served, QueueClient]]:
    """A queue with a learner session, a server at version 0, and worker w of 8 episodes."""
    sections = {"worker": {"episodes": 8}, **sections}
    async with serving(config(**sections), store) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        await client.begin_session(BeginSession(0, 0, steps, resume=False, fingerprint=DECLARED))
        await serve_version(client, 0)
        await register(client)
        yield queue, client


async def register(client: QueueClient, worker: str = "w", **report: Any) -> list[str]:
    """A heartbeat; the tickets that it says are lost."""
    reply = await client.heartbeat(
        WorkerReport(worker, **{"ticket_ids": [], "capacity": 8, "fingerprint": FOUND, **report})
    )
    return reply.lost_tickets


async def ask(client: QueueClient, step: int = 0, **changes: Any) -> list[Evaluation]:
    session = (await client.position()).session
    plain = EvaluationRequest(session, step, 0, rows=None, group_size=1, temperature=None, timeout_s=1000.0)
    return await client.evaluate(msgspec.structs.replace(plain, **changes))


async def take(client: QueueClient, count: int = 4, worker: str = "w", have: list[str] | None = None) -> list[Ticket]:
    return (await client.tickets(TicketRequest(worker, count, wait_s=0.0, have=have))).tickets


async def take_evals(client: QueueClient, count: int = 4, worker: str = "w") -> list[Ticket]:
    return [ticket for ticket in await take(client, count, worker) if ticket.kind == "eval"]


async def test_the_way_of_one_evaluation() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (queue, client):
        (asked,) = await ask(client, step=0, rows=3, group_size=2, temperature=0.5)
        assert (asked.ended, asked.rows, asked.done) == (None, None, 0)
        tickets = await take_evals(client)
        assert [(t.index, t.group_size, t.temperature, t.kind) for t in tickets] == [
            (0, 2, 0.5, "eval"),
            (1, 2, 0.5, "eval"),
            (2, 2, 0.5, "eval"),
        ]
        queue.time.now += 7.0
        rewards = [(0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]
        for ticket, pair in zip(tickets, rewards, strict=True):
            assert await client.submit(group(ticket, rewards=pair)) is True
        (found,) = await client.evaluations()
        assert (found.ended, found.rows, found.done, found.failed, found.rollouts) == ("complete", 3, 3, 0, 6)
        assert found.reward == pytest.approx(0.5)
        assert found.reward_std == pytest.approx(0.5)
        assert (found.best_name, found.best) == ("best@2", pytest.approx(2 / 3))
        assert found.best == pytest.approx(2 / 3)
        assert (found.mean_length, found.clipped, found.finished) == (3.0, 0.0, {"stop": 6})
        assert (found.versions, found.seconds) == ((0, 0), 7.0)
        status = await client.status()
        assert status.evaluations == [found]
        assert (status.ledger.issued, status.ledger.outstanding, status.groups.bytes) == (1, 1, 0), "I1: one to train"


async def test_i1_an_evaluation_is_in_no_sum_of_the_training_and_in_no_lease() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (queue, client):
        await ask(client)
        for ticket in await take_evals(client):
            await client.submit(group(ticket, rewards=[1.0]))
        assert (await client.lease(LeaseRequest(1, "l", 8, wait_s=0.0))).groups == []
        assert queue.broker.ledger.summary().outstanding == queue.broker.ledger.summary().issued
        assert queue.broker.ledger.bytes == 0
        assert (await client.status()).tokens_sampled == 0


async def test_the_one_before_the_first_step_may_take_a_whole_worker_since_the_learner_waits_for_it() -> None:
    async with running(eval={"every": 5, "at_start": True, "share": 0.25}) as (_, client):
        await ask(client)
        assert len(await take_evals(client, 8)) == 4
    async with running(eval={"every": 5, "at_start": True, "share": 0.25}) as (queue, client):
        await ask(client, step=5)
        queue.broker.ledger.run = msgspec.structs.replace(queue.broker.ledger.run, step=5)
        assert len(await take_evals(client, 8)) == 2


@pytest.mark.parametrize(("share", "evals", "trains"), [(0.25, 2, 3), (0.5, 4, 2), (0.01, 1, 3)])
async def test_evaluations_take_their_share_of_a_worker_and_no_more(share: float, evals: int, trains: int) -> None:
    """8 episodes, groups of 2 to train, of 1 to evaluate; it asks for two tickets' room, and then for two more."""
    async with running(eval={"every": 5, "share": share}) as (_, client):
        await ask(client)
        kinds = [ticket.kind for ticket in [*await take(client, 2), *await take(client, 2)]]
        assert kinds.count("eval") == evals
        assert kinds.count("train") == trains


async def test_a_group_above_a_workers_episodes_is_issued_alone() -> None:
    async with running(eval={"every": 5, "share": 0.25}) as (_, client):
        await ask(client, group_size=50)
        (ticket,) = await take_evals(client)
        assert ticket.group_size == 50
        assert await take_evals(client) == []
        await client.submit(group(ticket, rewards=[float(i == 7) for i in range(50)]))
        (found,) = await client.evaluations()
        assert (found.done, found.best_name, found.best, found.reward) == (1, "best@50", 1.0, 0.02)
        assert len(await take_evals(client)) == 1


async def test_evaluation_goes_on_where_training_may_have_no_tickets() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (_, client):
        assert {ticket.kind for ticket in await take(client, 100)} == {"train"}
        assert await take(client, 100) == []
        await ask(client)
        assert [ticket.kind for ticket in await take(client, 100)] == ["eval"] * 4


async def test_after_the_last_step_all_of_a_worker_evaluates_and_nothing_else_is_made() -> None:
    async with running(steps=1, eval={"at_end": True, "share": 0.25}) as (queue, client):
        trained = (await take(client, 1))[0]
        await client.submit(group(trained))
        await client.lease(LeaseRequest(1, "l", 1, wait_s=0.0))
        await client.ack("l", LeaseAck(1, [trained.id], step=1, version=1))
        await serve_version(client, 1)
        await ask(client, step=1, version=1)
        assert [ticket.kind for ticket in await take(client, 8)] == ["eval"] * 4
        queue.time.now += 10_000.0
        assert not (await client.status()).stall.stalled, "no step is expected any more"


async def test_i5_rows_wait_for_the_weights_that_were_asked_for() -> None:
    async with running(eval={"every": 5}) as (_, client):
        await ask(client, version=3)
        (open_one,) = (await client.status()).evaluations
        assert open_one.waits_for == "version 3 on every server that serves, the oldest has 0"
        assert await take_evals(client) == []
        wait = next(wait for wait in (await client.status()).waits if "evaluation" in wait.who)
        assert wait.who == "evaluation of step 0"
        await serve_version(client, 3)
        assert await take_evals(client)


async def test_i5_rows_of_weights_that_fail_their_proof_are_made_again() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (_, client):
        await ask(client)
        first, *_ = await take_evals(client)
        await client.submit(group(first, rewards=[1.0]))
        await move_server(client, ServerState.SYNCING)
        await move_server(client, ServerState.QUARANTINED, 0)
        (found,) = await client.evaluations()
        assert (found.done, found.reward, found.waits_for) == (0, None, "a server that serves")
        await serve_version(client, 1)
        again = await take_evals(client)
        assert [(ticket.index, ticket.id) for ticket in again] == [(0, "e0.0.1")]


async def one_version_on(queue: Served) -> None:
    """The learner has made version 1, and the server may have swapped it in; it has not been proven there."""
    run = queue.broker.ledger.run
    async with queue.broker.lock:
        await queue.broker.apply(Decision(run=msgspec.structs.replace(run, step=1, version=1)))


async def evaluation_waits(client: QueueClient) -> list[str]:
    return [wait.what for wait in (await client.status()).waits if wait.who.startswith("evaluation")]


@pytest.mark.parametrize("holds", [True, False])
async def test_i5_an_evaluation_whose_last_row_waits_for_a_proof_ends_with_it(holds: bool) -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (queue, client):
        await one_version_on(queue)
        await ask(client, rows=1)
        (ticket,) = await take_evals(client)
        await client.submit(group(ticket, rewards=[1.0], versions=(None, None, 1, 1, 1)))
        assert [found.ended for found in await client.evaluations()] == [None], "version 1 is not proven yet"
        awaited = f"the proof of the weights that {SERVER} sampled its rows with"
        assert await evaluation_waits(client) == [awaited], "the server serves"
        await move_server(client, ServerState.SYNCING)
        assert await evaluation_waits(client) == [awaited], "no server serves, but nothing is to be sampled any more"
        await move_server(client, ServerState.SERVING if holds else ServerState.QUARANTINED, 1)
        (found,) = await client.evaluations()
        assert (found.ended, found.done) == (("complete", 1) if holds else (None, 0))


async def test_i5_an_evaluation_that_ends_before_the_proof_counts_the_row_as_failed() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (queue, client):
        await one_version_on(queue)
        await ask(client, rows=1, timeout_s=50.0)
        (ticket,) = await take_evals(client)
        await client.submit(group(ticket, rewards=[1.0], versions=(None, None, 1, 1, 1)))
        queue.time.now += 51.0
        await queue.broker.expire()
        (found,) = await client.evaluations()
        assert (found.ended, found.done, found.reward) == ("deadline", 0, None)
        assert found.failures == {"unverified_server": 1}


async def test_a_lost_workers_rows_are_issued_again_up_to_the_attempts_and_then_failed() -> None:
    async with running(eval={"every": 5, "share": 1.0}, queue={"ticket_attempts": 2}) as (queue, client):
        await ask(client, rows=2)
        first = await take_evals(client)
        assert [ticket.id for ticket in first] == ["e0.0.0", "e0.1.0"]
        queue.time.now += 61.0
        await queue.broker.expire()
        assert await register(client, ticket_ids=[ticket.id for ticket in first]) == ["e0.0.0", "e0.1.0"]
        assert (await refusal(client.submit(group(first[0], rewards=[1.0])))).reason == "ticket_ended"
        again = await take_evals(client)
        assert [ticket.id for ticket in again] == ["e0.0.1", "e0.1.1"]
        await client.submit(group(again[1], rewards=[1.0]))
        await client.fail_ticket(again[0].id, TicketFailure("w", "reward", "boom"))
        (found,) = await client.evaluations()
        assert (found.ended, found.done, found.failed, found.failures) == ("complete", 1, 1, {"failed:reward": 1})
        assert found.reward == 1.0


async def test_a_row_that_would_fail_again_is_not_tried_again() -> None:
    async with running(eval={"every": 5}) as (_, client):
        await ask(client, rows=1)
        (ticket,) = await take_evals(client)
        await client.fail_ticket(ticket.id, TicketFailure("w", "prompt", "too long", retryable=False))
        (found,) = await client.evaluations()
        assert (found.ended, found.rows, found.failed, found.reward) == ("complete", 1, 1, None)
        assert (await client.status()).gave_up is None


async def test_a_heartbeat_renews_the_tickets_of_an_evaluation() -> None:
    async with running(eval={"every": 5}) as (queue, client):
        await ask(client)
        (ticket, *_) = await take_evals(client)
        for _ in range(3):
            queue.time.now += 50.0
            assert await register(client, ticket_ids=[ticket.id]) == []
            await queue.broker.expire()
        assert await client.submit(group(ticket, rewards=[1.0]))


async def test_a_lost_answer_is_delivered_again() -> None:
    async with running(eval={"every": 5}) as (_, client):
        await ask(client)
        first = await take(client)
        assert {ticket.id for ticket in await take(client, have=[])} == {ticket.id for ticket in first}
        assert "e0.0.0" not in {ticket.id for ticket in await take(client, have=[ticket.id for ticket in first])}


async def test_a_group_may_be_sent_again_even_the_one_that_ended_its_evaluation() -> None:
    async with running(eval={"every": 5}) as (_, client):
        await ask(client, rows=1)
        (ticket,) = await take_evals(client)
        assert await client.submit(group(ticket, rewards=[1.0])) is True
        assert await client.submit(group(ticket, rewards=[1.0])) is False
        assert (await refusal(client.submit(group("e7.0.0", rewards=[1.0])))).reason == "ticket_ended"


async def test_the_door_takes_the_tickets_own_size() -> None:
    async with running(eval={"every": 5, "share": 1.0}, queue={"ticket_attempts": 1}) as (_, client):
        await ask(client, rows=2, group_size=3)
        one, other = await take_evals(client)
        assert await client.submit(group(one, rewards=[1.0])) is True, "its siblings failed"
        refused = await refusal(client.submit(group(other, rewards=[1.0] * 4)))
        assert (refused.reason, "allowed are 1 to 3" in str(refused)) == ("group_size", True)
        (found,) = await client.evaluations()
        assert (found.ended, found.failures) == ("complete", {"rejected:group_size": 1})


async def test_a_deadline_ends_what_cannot_go_on_and_tells_what_was_done() -> None:
    async with running(eval={"every": 5, "share": 0.25}) as (queue, client):
        await ask(client, timeout_s=100.0)
        one, _ = await take_evals(client)
        await client.submit(group(one, rewards=[0.5]))
        queue.time.now += 101.0
        await queue.broker.expire()
        (found,) = await client.evaluations()
        assert (found.ended, found.rows, found.done, found.failures) == ("deadline", 4, 1, {"deadline": 3})
        assert found.reward == 0.5
        assert await take_evals(client) == []


async def test_an_evaluation_that_no_server_and_no_worker_serves_ends_too() -> None:
    async with running(eval={"every": 5}) as (queue, client):
        await client.put_server(Server(SERVER, (await client.servers())[0].url, ServerState.DOWN))
        await ask(client, timeout_s=100.0)
        queue.time.now += 101.0
        await queue.broker.expire()
        (found,) = await client.evaluations()
        assert (found.ended, found.rows, found.reward) == ("deadline", None, None)


async def test_a_data_set_without_rows_gives_an_evaluation_without_any() -> None:
    async with running(eval={"every": 5}) as (queue, client):
        run = queue.broker.ledger.run
        assert run.data is not None
        queue.broker.ledger.run = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, eval_rows=0))
        await ask(client)
        assert await take_evals(client) == []
        (found,) = await client.evaluations()
        assert (found.ended, found.rows, found.done, found.reward) == ("complete", 0, 0, None)


async def test_two_that_are_due_both_run_the_older_first() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (_, client):
        await ask(client, step=0, rows=2)
        await ask(client, step=0, rows=3)
        await ask(client, step=5, rows=3)
        assert [ticket.id for ticket in await take_evals(client)] == ["e0.0.0", "e0.1.0", "e1.0.0", "e1.1.0", "e1.2.0"]


async def test_too_many_open_ones_are_refused_with_the_remedy() -> None:
    async with running(eval={"every": 5}) as (_, client):
        for step in range(MAX_OPEN):
            await ask(client, step=step)
        refused = await refusal(ask(client, step=99))
        assert (refused.status, refused.reason) == (409, "evaluations_open")
        assert "raise eval.every or eval.share, or lower eval.rows" in str(refused)


async def test_only_the_newest_learner_asks() -> None:
    async with running(eval={"every": 5}) as (_, client):
        assert (await refusal(ask(client, session=7))).reason == "session_superseded"
        assert (await refusal(ask(client, group_size=0))).reason == "decode"


async def test_a_learner_that_resumes_finds_what_was_done_and_not_what_it_will_do_again() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (_, client):
        for step in (0, 5, 10):
            await ask(client, step=step, rows=1)
        for ticket in (await take_evals(client))[:2]:
            await client.submit(group(ticket, rewards=[1.0]))
        await client.begin_session(BeginSession(0, 0, 100, resume=True, fingerprint=DECLARED))
        assert [(found.step, found.ended) for found in await client.evaluations()] == [(0, "complete")]
        await ask(client, step=0, rows=1)
        assert len(await client.evaluations()) == 1, "it is not made again"


async def test_a_fresh_start_forgets_the_evaluations_of_a_run_that_trained_nothing() -> None:
    async with running(eval={"at_start": True}) as (_, client):
        await ask(client)
        (ticket,) = (await take_evals(client))[:1]
        await client.begin_session(BeginSession(0, 0, 100, resume=False, fingerprint=DECLARED))
        assert await client.evaluations() == []
        await register(client)
        await ask(client)
        assert {other.id for other in await take_evals(client)}.isdisjoint({ticket.id}), "no number is used twice"


async def test_a_restart_of_the_queue_goes_on_with_an_open_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    async with running(SqliteStore(path), eval={"every": 5}) as (_, client):
        await ask(client, step=0, temperature=0.0)
        done, out = await take_evals(client)
        await client.submit(group(done, rewards=[1.0]))
    again = config(worker={"episodes": 8}, eval={"every": 5})
    async with serving(again, SqliteStore(path)) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        (found,) = await client.evaluations()
        assert (found.done, found.rows, found.temperature, found.reward) == (1, 4, 0.0, 1.0)
        assert await register(client, ticket_ids=[out.id]) == []
        assert await client.submit(group(out, rewards=[0.0])) is True
        for ticket in await take_evals(client):
            await client.submit(group(ticket, rewards=[0.0]))
        (found,) = await client.evaluations()
        assert (found.ended, found.done, found.reward) == ("complete", 4, 0.25)


async def test_the_end_of_the_run_ends_what_is_open() -> None:
    async with running(eval={"every": 5}) as (_, client):
        await ask(client)
        await client.finish(1)
        (found,) = await client.evaluations()
        assert found.ended == "run_over"


async def test_the_learner_waits_for_an_end_without_asking_again_and_again() -> None:
    async with running(eval={"every": 5}) as (_, client):
        await ask(client, rows=1)
        (ticket,) = await take_evals(client)
        waiting = asyncio.create_task(client.evaluations(wait_s=50.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await client.submit(group(ticket, rewards=[1.0]))
        assert (await asyncio.wait_for(waiting, 5.0))[0].ended == "complete"


async def test_the_best_of_each_role_counts_and_not_the_best_role() -> None:
    """Worked by hand: the solver's best are 1 and 0, the critic's -1 and -3."""
    async with running(eval={"every": 5, "share": 1.0}) as (_, client):
        await ask(client, rows=2, group_size=2)
        first, second = await take_evals(client)
        roles = [("solver", 1.0), ("critic", -1.0), ("solver", 0.0), ("critic", -5.0)]
        await client.submit(group_of_roles(*roles, ticket=first))
        await client.submit(group_of_roles(("solver", 0.0), ("critic", -3.0), ticket=second))
        (found,) = await client.evaluations()
        assert found.rewards == {"solver": 0.25, "critic": -3.0}
        assert (found.done, found.rollouts, found.best_name, found.best) == (2, 6, "best@2", -0.75)


async def test_rewards_by_function_and_what_was_cut_off() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (_, client):
        await ask(client, rows=2, group_size=2)
        for ticket, reward in zip(await take_evals(client), (0.5, 2.0), strict=True):
            rollouts = [
                Rollout([segment([None, 0, 0])], reward, "length", {"right": 1.0, "brief": None}),
                Rollout([segment([None, 0])], 0.0, "stop", {"right": 0.0, "brief": 0.25}),
            ]
            await client.submit(group(ticket, rollouts=rollouts))
        (found,) = await client.evaluations()
        assert found.rewards == {"right": 0.5, "brief": 0.25}
        assert (found.clipped, found.mean_length, found.finished) == (0.5, 1.5, {"length": 2, "stop": 2})
        assert (found.best_name, found.best, found.reward) == ("best@2", 1.25, 0.625)
        assert evaluation_metrics(found)["eval/rewards/right/mean"] == 0.5
        assert evaluation_metrics(found)["eval/best@2"] == 1.25


async def test_status_metrics_and_rollouts_show_it() -> None:
    async with running(eval={"every": 5, "share": 1.0}) as (queue, client):
        await ask(client, rows=1)
        (ticket,) = await take_evals(client)
        await client.submit(group(ticket, rewards=[0.75]))
        await ask(client, step=5)
        async with aiohttp.ClientSession() as session, session.get(f"{queue.url}/metrics") as response:
            metrics = await response.text()
        assert 'slipstream_eval{name="eval/reward"} 0.75' in metrics
        assert "slipstream_evaluations_open 1.0" in metrics
        (shown,) = await client.rollouts(4, evals=True)
        assert (shown.evaluation, shown.index, shown.reward) == (0, 0, 0.75)
        assert await client.rollouts(4) == []


async def test_a_worker_that_is_refused_gives_its_rows_back() -> None:
    async with running(eval={"every": 5}) as (_, client):
        await ask(client)
        held = await take_evals(client)
        other = msgspec.structs.replace(FOUND, eval_data="other")
        refused = await refusal(register(client, fingerprint=other))
        assert "rows of the eval_dataset differ: other, the run has e" in str(refused)
        await register(client, "v")
        assert [ticket.index for ticket in await take_evals(client, worker="v")] == [ticket.index for ticket in held]


def test_ended_ones_are_remembered_within_a_bound() -> None:
    assert MAX_ENDED > MAX_OPEN
