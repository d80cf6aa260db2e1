"""Whole workers at a real queue with an evaluation open: whoever is lost meanwhile, it comes to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig, fingerprint
from slipstream.protocol.messages import BeginSession
from slipstream.protocol.status import Evaluation, EvaluationRequest
from slipstream.rollout_queue.store.sqlite import SqliteStore
from slipstream.rollout_worker.episodes.source import SourceContext
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.failures import FailureNotices
from slipstream.rollout_worker.sources import source_of
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.ticket_loop import Worker
from slipstream.rollout_worker.user_code import UserCode
from tests.kit import WORKER, config
from tests.kit.fake_vllm import serving as serving_vllm
from tests.kit.queue import Served, serve_version, serving
from tests.kit.worker import TOKENIZER, fake, row, task, until

EVALS = [row(10 + number, 3) for number in range(8)]
SECTIONS: dict[str, dict[str, Any]] = {"worker": {"episodes": 8}, "eval": {"every": 5, "share": 0.5}}
CONFIG = config(WORKER, **SECTIONS)


@asynccontextmanager
async def standing(
    vllm: str, store: SqliteStore | None = None, begin: bool = True
) -> AsyncIterator[tuple[Served, QueueClient]]:
    """A queue with a learner session and a server at version 7."""
    run_config = config(WORKER, **SECTIONS, vllm={"servers": [vllm]})
    async with serving(run_config, store) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        # The fakes' labels are bare.
        queue.broker.ledger.run = msgspec.structs.replace(queue.broker.ledger.run, id="")
        if begin:
            declared = fingerprint.of(run_config, TOKENIZER)
            await client.begin_session(BeginSession(0, 0, 100, resume=False, fingerprint=declared))
            queue.broker.ledger.run = msgspec.structs.replace(queue.broker.ledger.run, version=7)
            await serve_version(client, 7)
        yield queue, client


@asynccontextmanager
async def worker(run_config: RunConfig, the_task: Task, client: QueueClient, name: str) -> AsyncIterator[Worker]:
    """A worker that works until the block is left, and is told to stop then."""
    async with AsyncExitStack() as stack:
        inference = await stack.enter_async_context(InferenceClient(run_config.worker.request_timeout_s))
        code = await stack.enter_async_context(UserCode(run_config.worker.user_threads))
        context = SourceContext(run_config, the_task, code, TOKENIZER)
        source = await stack.enter_async_context(source_of(the_task).open(context))
        made = Worker(run_config, the_task, client, name, source, inference, code, FailureNotices())
        stop = asyncio.Event()
        running = asyncio.create_task(made.run(stop))
        try:
            yield made
        finally:
            stop.set()
            await running


async def ask(client: QueueClient, **changes: Any) -> None:
    session = (await client.position()).session
    plain = {"rows": None, "group_size": 1, "temperature": 0.0, "timeout_s": 1000.0}
    await client.evaluate(EvaluationRequest(session, 0, 7, **{**plain, **changes}))


async def ended(client: QueueClient) -> Evaluation:
    async with asyncio.timeout(60.0):
        while (found := (await client.evaluations(wait_s=1.0))[0]).ended is None:
            pass
    return found


def evaluated_by(queue: Served, worker_id: str) -> list[str]:
    """The tickets of evaluations that a worker holds."""
    return [ticket.id for ticket in queue.broker.ledger.held_by(worker_id) if ticket.kind == "eval"]


def gate(passes: Callable[[], bool]) -> Callable[..., Any]:
    """A reward that is given once `passes` holds."""

    async def accuracy(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
        while not passes():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return [float(turns[-1]["content"] == str(right)) for turns, right in zip(completions, answer, strict=True)]

    return accuracy


async def test_an_evaluation_runs_beside_the_training_and_holds_none_of_it_up() -> None:
    server = fake(version=7)
    async with serving_vllm(server) as url, standing(url) as (queue, client):
        await ask(client)
        async with worker(CONFIG, task(eval_dataset=EVALS), client, "w"):
            found = await ended(client)
            await until(lambda: queue.broker.ledger.outstanding > 0)
    assert (found.ended, found.rows, found.done, found.reward) == ("complete", 8, 8, 1.0)
    assert (found.versions, found.finished) == ((7, 7), {"stop": 8})
    temperatures = [request["sampling_params"]["temperature"] for request in server.requests]
    assert temperatures.count(0.0) == 16, "two turns a row"
    assert 1.0 in temperatures
    tickets = queue.broker.ledger.summary()
    assert tickets.issued == tickets.outstanding + tickets.reissued + tickets.dropped, "I1"


async def test_a_group_above_a_workers_episodes_and_one_of_one() -> None:
    async with serving_vllm(fake(version=7)) as url, standing(url) as (_, client):
        await ask(client, rows=2, group_size=20, temperature=None)
        async with worker(CONFIG, task(eval_dataset=EVALS), client, "w"):
            found = await ended(client)
    assert (found.done, found.rollouts, found.best_name, found.best) == (2, 40, "best@20", 1.0)


async def test_what_a_stopped_worker_held_goes_to_another() -> None:
    opened = False
    the_task = task(eval_dataset=EVALS, rewards=[gate(lambda: opened)])
    async with serving_vllm(fake(version=7)) as url, standing(url) as (queue, client):
        await ask(client)
        async with worker(CONFIG, the_task, client, "first"):
            await until(lambda: len(evaluated_by(queue, "first")) == 4)
        assert evaluated_by(queue, "first") == []
        opened = True
        async with worker(CONFIG, the_task, client, "second"):
            found = await ended(client)
    assert (found.ended, found.done, found.failed) == ("complete", 8, 0)


async def test_what_a_killed_worker_held_goes_to_another_once_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = False
    the_task = task(eval_dataset=EVALS, rewards=[gate(lambda: opened)])
    async with serving_vllm(fake(version=7)) as url, standing(url) as (queue, client):
        await ask(client)
        async with worker(CONFIG, the_task, client, "first"):
            await until(lambda: len(evaluated_by(queue, "first")) == 4)
            monkeypatch.setattr("slipstream.rollout_worker.ticket_loop.leave", _nothing)
        assert len(evaluated_by(queue, "first")) == 4
        queue.time.now += 61.0
        await queue.broker.expire()
        opened = True
        async with worker(CONFIG, the_task, client, "second"):
            found = await ended(client)
    assert (found.ended, found.done, found.failed) == ("complete", 8, 0)


async def _nothing(*_: Any) -> None: ...


async def test_the_queue_is_restarted_in_the_middle_and_the_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = False
    path, the_task = tmp_path / "queue.db", task(eval_dataset=EVALS, rewards=[gate(lambda: opened)])
    async with serving_vllm(fake(version=7)) as url, AsyncExitStack() as stack:
        async with standing(url, SqliteStore(path)) as (queue, client):
            await ask(client)
            async with worker(CONFIG, the_task, client, "w"):
                await until(lambda: len(evaluated_by(queue, "w")) == 4)
                monkeypatch.setattr("slipstream.rollout_worker.ticket_loop.leave", _nothing)
        opened = True
        queue, client = await stack.enter_async_context(standing(url, SqliteStore(path), begin=False))
        assert len(evaluated_by(queue, "w")) == 4
        await stack.enter_async_context(worker(CONFIG, the_task, client, "w"))
        found = await ended(client)
    assert (found.ended, found.done, found.failed) == ("complete", 8, 0)


async def test_rows_that_fail_are_counted_and_the_others_are_not_held_up() -> None:
    broken = [*EVALS[:3], {"prompt": None, "answer": 0}, *EVALS[4:]]

    def picky(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
        if answer[0] == EVALS[5]["answer"]:
            raise ValueError("no such answer")
        return [1.0] * len(completions)

    the_task = task(eval_dataset=broken, rewards=[picky])
    async with serving_vllm(fake(version=7)) as url, standing(url) as (queue, client):
        await ask(client)
        async with worker(CONFIG, the_task, client, "w"):
            found = await ended(client)
        assert queue.broker.early_failures.gave_up is None
    assert (found.rows, found.done, found.failed) == (8, 6, 2)
    assert found.failures == {"failed:row": 1, "failed:reward": 1}
