"""The way of a group through queue, worker and learner is one trace."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slipstream.learner import run as learner_process
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.feeder import Feeder
from slipstream.protocol import reasons, tracing
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import fingerprint, to_toml
from slipstream.protocol.messages import BeginSession, LearnerReport
from slipstream.protocol.tracing import TicketTrace
from slipstream.protocol.versions import label_of
from slipstream.rollout_queue.store.memory import MemoryStore
from slipstream.rollout_worker.episodes.source import SourceContext
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.failures import FailureNotices
from slipstream.rollout_worker.sources import source_of
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.ticket_loop import Worker
from slipstream.rollout_worker.user_code import UserCode
from tests.kit import WORKER, config
from tests.kit.fake_vllm import FakeVllm
from tests.kit.fake_vllm import serving as serving_vllm
from tests.kit.fake_vllm.policies import scripted
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.ports import free_port
from tests.kit.queue import Served, serve_version, serving
from tests.kit.supervised import Processes, processes
from tests.kit.traces import Collector, collecting, traced
from tests.kit.worker import TOKENIZER, fake, task, until
from tests.rollout_worker.test_evaluation_processes import Learner

LEARNT = LearnerReport(1, 0.0, 0.0, 0.0, 1, 0.0, 0)


@asynccontextmanager
async def run(the_task: Task, **learner: Any) -> AsyncIterator[tuple[Served, QueueClient, Feeder, FakeVllm]]:
    """A queue, a worker, a server at version 0 and a learner that takes one group a step."""
    vllm = fake(version=0)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving_vllm(vllm))
        of_learner = {"groups_per_step": 1, "prefetch_steps": 1, "zero_variance": "keep", **learner}
        run_config = config(WORKER, vllm={"servers": [url]}, learner=of_learner, queue={"depth": 1})
        queue = await stack.enter_async_context(serving(run_config, MemoryStore()))
        vllm.engine.weight_version = label_of(queue.broker.ledger.run.id, 0)
        client = await stack.enter_async_context(QueueClient(queue.url, patience_s=5.0))
        blocking = await asyncio.to_thread(BlockingQueueClient(QueueClient(queue.url)).__enter__)
        stack.push_async_callback(asyncio.to_thread, blocking.__exit__, None, None, None)
        declared = fingerprint.of(run_config, TOKENIZER)
        start = await client.begin_session(BeginSession(0, 0, 100, resume=False, fingerprint=declared))
        await serve_version(client, 0)
        feeder = Feeder(run_config, blocking, start)
        await asyncio.to_thread(feeder.__enter__)
        stack.push_async_callback(asyncio.to_thread, feeder.__exit__, None, None, None)
        inference = await stack.enter_async_context(InferenceClient(5.0))
        code = await stack.enter_async_context(UserCode(4))
        source = await stack.enter_async_context(
            source_of(the_task).open(SourceContext(run_config, the_task, code, TOKENIZER))
        )
        worker = Worker(run_config, the_task, client, "w", source, inference, code, FailureNotices())
        stop = asyncio.Event()
        working = asyncio.create_task(worker.run(stop))
        try:
            yield queue, client, feeder, vllm
        finally:
            stop.set()
            await working


def learn(feeder: Feeder, run_id: str) -> str:
    """Takes a batch and acknowledges it, as the learner's loop does. Returns its ticket."""
    batch = feeder.next_batch()
    links = [TicketTrace(run_id, ticket) for ticket in batch.ticket_ids]
    with tracing.span("step", links=links, step=batch.step):
        feeder.trained(batch, LEARNT)
    return batch.ticket_ids[0]


async def test_the_way_of_a_group_is_one_trace() -> None:
    with traced() as found:
        async with run(task()) as (queue, _, feeder, vllm):
            run_id = queue.broker.ledger.run.id
            ticket = await asyncio.to_thread(learn, feeder, run_id)
    trace_id, root_id = TicketTrace(run_id, ticket).ids
    spans = [span for span in found() if span.context.trace_id == trace_id]
    by_id = {span.context.span_id: span.name for span in spans}
    assert len(by_id) == len(spans), "no id twice"
    parents = {(span.name, by_id[span.parent.span_id] if span.parent else None) for span in spans}
    assert parents == {
        ("ticket", None),
        *(("issued", "ticket"), ("ready", "ticket"), ("leased", "ticket")),
        *(("group", "ticket"), ("episode", "group"), ("generate", "episode"), ("tools", "episode")),
        *(("reward", "group"), ("submit", "group"), ("PUT /v1/groups/{id}", "submit"), ("feed", "ticket")),
    }
    assert by_id[root_id] == "ticket"
    named = {span.name: span for span in spans}
    order = [named[name] for name in ("issued", "ready", "leased")]
    for before, after in itertools.pairwise(order):
        assert before.end_time == after.start_time
    assert named["ticket"].end_time == named["issued"].start_time
    facts = {key.removeprefix("slipstream."): value for key, value in named["group"].attributes.items()}
    assert facts["ticket"] == ticket
    assert (facts["row"], facts["version"], facts["rollouts"], facts["servers"]) == (0, 0, 2, ("vllm-0",))
    assert facts["reward"] == 1.0
    assert named["feed"].attributes["slipstream.tokens"] == facts["tokens"] > 0
    assert named["feed"].attributes["slipstream.staleness"] == 0
    assert named["leased"].attributes["slipstream.next_state"] == "trained"
    generated = [span for span in spans if span.name == "generate"]
    assert sorted(span.attributes["slipstream.turn"] for span in generated) == [1, 1, 2, 2]
    assert sum(span.attributes["slipstream.tokens"] for span in generated) == facts["tokens"]

    step = next(span for span in found() if span.name == "step")
    assert [(link.context.trace_id, link.context.span_id) for link in step.links] == [(trace_id, root_id)]
    assert [link.context for link in named["feed"].links] == [step.context]
    acknowledged = [span for span in found() if span.name == "POST /v1/leases/{id}/ack"]
    assert step.context.span_id in {span.parent.span_id for span in acknowledged}

    sent = [header.split("-") for header in vllm.traceparents if header is not None]
    assert len(sent) == len(vllm.traceparents) > 0
    ours = {parent for _, trace, parent, flags in sent if (int(trace, 16), flags) == (trace_id, "01")}
    names = {by_id[int(parent, 16)] for parent in ours}
    assert names == {"group", "generate"}, "the first turn of all is one request"


async def test_a_dropped_group_has_its_reason_in_its_trace() -> None:
    def none(completions: list[Any], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    with traced() as found:
        async with run(task(rewards=[none]), zero_variance="drop") as (queue, _, _, _):
            await until(lambda: queue.broker.ledger.summary().dropped > 0)
    dropped = [span for span in found() if span.name in ("leased", "feed") and not span.status.is_ok]
    assert {span.name for span in dropped} == {"leased", "feed"}
    assert {span.attributes["slipstream.reason"] for span in dropped} == {reasons.ZERO_VARIANCE}
    assert not any(span.links for span in dropped)


async def test_a_failed_group_has_its_reason_in_its_trace() -> None:
    def fails(completions: list[Any], **columns: Any) -> list[float]:
        raise ValueError("secret words of a task")

    with traced() as found:
        async with run(task(rewards=[fails])) as (queue, _, _, _):
            await until(lambda: queue.broker.ledger.summary().reissued > 0)
    failed = {(span.name, span.attributes["slipstream.reason"]) for span in found() if not span.status.is_ok}
    assert {("group", reasons.REWARD), ("issued", reasons.failed(reasons.REWARD))} <= failed
    assert "secret" not in "".join(span.to_json() for span in found())


async def test_off_no_request_has_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = aiohttp.ClientSession._request

    async def request(self: aiohttp.ClientSession, *given: Any, **named: Any) -> Any:
        seen.append(named.get("headers"))
        return await real(self, *given, **named)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", request)
    assert not tracing.is_on()
    async with run(task()) as (_, _, feeder, vllm):
        await asyncio.to_thread(learn, feeder, "")
    assert vllm.traceparents
    assert set(vllm.traceparents) == {None}
    assert seen
    assert not any("traceparent" in (headers or {}) for headers in seen)


TASK = """
from slipstream.rollout_worker.task.task import Task

def reward(completions, **columns):
    return [float(number) for number in range(len(completions))]

task = Task(dataset=[{"prompt": [{"role": "user", "content": "Count."}]}], rewards=[reward])
"""


def test_processes_send_the_spans_of_one_trace_to_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    save_model_folder(tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK)
    with collecting() as collector, processes(tmp_path / "logs") as started:
        asyncio.run(step_of(tmp_path, started, collector))


async def step_of(folder: Path, started: Processes, collector: Collector) -> None:
    """A step with a queue and a worker as processes, until the collector has the spans of one of its groups."""
    vllm = fake(scripted(TOKENIZER, lambda text, index: f"I say {index}"), version=0)
    async with serving_vllm(vllm) as url:
        run_config = config(
            WORKER,
            run={"dir": str(folder), "name": "run"},
            model={"path": str(folder / "model")},
            task={"path": f"{folder / 'task.py'}:task"},
            queue={"port": free_port()},
            vllm={"servers": [url]},
            tracking={"traces": collector.url},
        )
        (run_file := folder / "run.toml").write_text(to_toml(run_config))
        started.slipstream("queue", "queue", str(run_file))
        started.slipstream("worker", "worker", str(run_file), "--name", "w1")
        async with QueueClient(run_config.queue.address, patience_s=60.0) as client, asyncio.timeout(120.0):
            learner = Learner(client, vllm, url)
            await learner.begin(run_config, 0, 0, resume=False)
            await learner.train()
            (ticket, *_) = learner.have
            trace_id, _ = TicketTrace((await client.position()).run, ticket).ids

            def found() -> set[tuple[str, str]]:
                return {
                    (process["service.name"], span.name)
                    for process, span in collector.spans()
                    if int.from_bytes(span.trace_id, "big") == trace_id
                }

            wanted = {("queue", "ticket"), ("queue", "leased"), ("worker", "generate"), ("worker", "group")}
            await until(lambda: {(f"slipstream-{of}", name) for of, name in wanted} <= found())


class Began(Exception):
    """The learner's process has got so far."""


def test_a_learner_traces_where_the_run_file_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    @contextmanager
    def sending(*given: object) -> Iterator[None]:
        opened.append(given)
        raise Began
        yield

    monkeypatch.setattr(tracing, "sending", sending)
    with pytest.raises(Began):
        learner_process.run(config(tracking={"traces": "http://collector:4318/"}))
    assert opened == [("http://collector:4318", "learner", "run")]
