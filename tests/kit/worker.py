"""Runs a whole worker against fake servers and the stand-in queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import Rollout
from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.episodes.source import SourceContext
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.failures import FailureNotices
from slipstream.rollout_worker.sources import source_of
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.ticket_loop import Worker
from slipstream.rollout_worker.user_code import UserCode
from tests import kit
from tests.kit.fake_vllm import FakeEngine, FakeVllm, Fault, serving
from tests.kit.fake_vllm.policies import Policy, multiplying, scripted
from tests.kit.fake_vllm.tokenizer import tiny_tokenizer
from tests.kit.stand_in_queue import StandInQueue, serving_at, tickets_for

TOKENIZER = tiny_tokenizer()
END_OF_TURN: int = TOKENIZER.eos_token_id


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


class ReadableOnce(list[Any]):
    """Rows of which only a first look can be read."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        if self.looks > 1:
            raise OSError("the disk is gone")
        return super().__getitem__(place)


def accuracy(completions: list[list[dict[str, Any]]], answer: list[int], **columns: Any) -> list[float]:
    return [float(turns[-1]["content"] == str(right)) for turns, right in zip(completions, answer, strict=True)]


def row(a: int = 12, b: int = 34, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"Multiply {a} by {b}."}], "answer": a * b, **columns}


def task(**changes: Any) -> Task:
    return Task(**{"dataset": [row()], "tools": [multiply], "rewards": [accuracy], **changes})


def fake(policy: Policy | None = None, faults: Sequence[Fault] = (), version: int = 7, **engine: Any) -> FakeVllm:
    """Make a fake server at weights `version`. By default its policy multiplies with the tool."""
    server = FakeVllm(
        FakeEngine(
            policy=policy or scripted(TOKENIZER, multiplying),
            stop_token_ids=[END_OF_TURN],
            weight_version=str(version),
            **engine,
        )
    )
    server.faults.extend(faults)
    return server


def chat_format(tools: Sequence[dict[str, Any]] = ()) -> TemplateFormat:
    return TemplateFormat(TOKENIZER, [END_OF_TURN], tools, "the tiny model")


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class Run:
    worker: Worker
    queue: StandInQueue

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.queue.groups for rollout in group.rollouts]


async def roll(
    the_task: Task,
    *fakes: FakeVllm,
    tickets: int = 1,
    config: RunConfig | None = None,
    version: int = 7,
    queue: StandInQueue | None = None,
    stop_when: Callable[[Worker], bool] | None = None,
    ping_s: float = 1.0,
    tokenizer: Any = TOKENIZER,
    **options: Any,
) -> Run:
    """Run a worker until it has finished `tickets`, or until `stop_when` returns True for it.

    Args:
        the_task: The task.
        *fakes: Servers to serve.
        tickets: Number of tickets in the queue.
        config: The run file; None for the tests' own.
        version: Version of the tickets and servers.
        queue: The queue; None for a new one with `tickets`.
        stop_when: Tells whether to stop the worker; None to never stop it.
        ping_s: Option `ping_s` of `UserCode`, in seconds.
        tokenizer: The run's tokenizer, whose template renders the conversations.
        **options: Options of the worker.
    """
    config = config or kit.config(kit.WORKER)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(server)) for server in fakes]
        queue = queue or StandInQueue(tickets_for(tickets, config.rollout.group_size, version))
        queue.servers = queue.servers or serving_at(*urls, version=version)
        client = await stack.enter_async_context(InferenceClient(config.worker.request_timeout_s))
        code = await stack.enter_async_context(
            UserCode(config.worker.user_threads, ping_s=ping_s, environment_threads=config.worker.episodes)
        )
        notices = FailureNotices()
        context = SourceContext(config, the_task, code, tokenizer, partial(notices.add, "code"))
        source = await stack.enter_async_context(source_of(the_task).open(context))
        worker = Worker(config, the_task, queue, "w0", source, client, code, notices, **options)
        stop = asyncio.Event()
        running = asyncio.create_task(worker.run(stop))
        if stop_when is not None:
            await until(lambda: stop_when(worker) or running.done())
            stop.set()
        await running
    return Run(worker, queue)
