"""Runs a worker: as a process, or as a coroutine on a running loop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from functools import partial

import uvloop

from slipstream.protocol import tracing
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import WorkerReport
from slipstream.rollout_worker.chat.tokenizer import load_tokenizer
from slipstream.rollout_worker.data.dataset import check_evaluation, count_eval_rows
from slipstream.rollout_worker.data.order import check_order
from slipstream.rollout_worker.episodes.source import SourceContext
from slipstream.rollout_worker.heartbeat import Queue
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.failures import FailureNotices
from slipstream.rollout_worker.memory import return_large_blocks
from slipstream.rollout_worker.sources import source_of
from slipstream.rollout_worker.task.task import Task, load_task
from slipstream.rollout_worker.ticket_loop import UserCodeShutOff, Worker
from slipstream.rollout_worker.user_code import UserCode

logger = logging.getLogger(__name__)

# Seconds that a thread keeps the interpreter lock while others wait for it. The event loop waits for every running
# thread of user code; with Python's default of 5 ms and 64 threads that is a third of a second.
_SWITCH_S = 0.0005
# Loggers of clients; `openai` brings httpx or httpx2 by its version.
CLIENTS = ("httpx", "httpx2", "openai", "anthropic")


def run(config: RunConfig, queue_url: str | None = None, worker_id: str | None = None) -> int:
    """Work until the run is finished, or SIGTERM or SIGINT comes.

    Returns: The exit code: 0 if the run is finished, 1 where a fresh process is needed to call user code again, and
        128 + number of a signal.

    Raises:
        ConfigError: The run file, the task or the queue does not let this worker work.
        QueueError: The queue cannot be reached.
    """
    # A log line that cannot be written must not end the worker: user code may close sys.stderr.
    logging.raiseExceptions = False
    quiet_clients()
    return_large_blocks()
    task = load_task(config.task)
    check_order(task.rows, config.task, task.has_no_data)  # a fault of the data set ends the worker here
    check_evaluation(config, task.eval_dataset)
    if config.eval.is_on:
        count_eval_rows(task.eval_rows, config.eval.rows)
    sys.setswitchinterval(_SWITCH_S)
    own_name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    with (
        tracing.sending(config.tracking.traces, "worker", config.run.name),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            return runner.run(_run(config, task, queue_url or config.queue.address, worker_id or own_name))
        except UserCodeShutOff as error:
            logger.error("the worker ends and needs to be started again: %s", error)
            return 1
        except SystemExit as error:
            logger.error("a task's code ended the worker by SystemExit(%r)", error.code)
            return 1


def quiet_clients() -> None:
    """Silence HTTP clients of agents and tools, which log a line for each request and each retry."""
    for name in CLIENTS:
        logging.getLogger(name).setLevel(logging.WARNING)


async def work(config: RunConfig, task: Task, queue: Queue, worker_id: str, stop: asyncio.Event) -> WorkerReport:
    """Run a worker on the running loop until the run is finished or `stop` is set. Returns its last report."""
    notices = FailureNotices()
    isolated = config.task if config.worker.tool_isolation == "process" else None
    async with (
        UserCode(
            config.worker.user_threads,
            isolated,
            environment_threads=config.worker.episodes,
            agents=config.worker.episodes,
            may_isolate=task.may_isolate,
        ) as code,
        InferenceClient(config.worker.request_timeout_s, config.token_for("worker")) as client,
        source_of(task).open(
            SourceContext(config, task, code, load_tokenizer(config.model), partial(notices.add, "code"))
        ) as source,
    ):
        worker = Worker(config, task, queue, worker_id, source, client, code, notices)
        await worker.run(stop)
    return worker.report()


async def _run(config: RunConfig, task: Task, queue_url: str, worker_id: str) -> int:
    stop = asyncio.Event()
    code = 0

    def told_to_stop(number: int) -> None:
        nonlocal code
        code = 128 + number
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_stop, number)
    logger.info("worker %s: up to %d episodes for the queue at %s", worker_id, config.worker.episodes, queue_url)
    async with QueueClient(queue_url, config.token_for("worker")) as queue:
        report = await work(config, task, queue, worker_id, stop)
    logger.info("worker %s: %d episodes done, %d failed", worker_id, report.episodes_done, report.episodes_failed)
    return code
