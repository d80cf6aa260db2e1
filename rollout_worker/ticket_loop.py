"""The worker's loop: takes tickets, makes their groups, submits them, and reports. It keeps no state beyond its
life."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from slipstream.protocol import reasons, tracing
from slipstream.protocol.client import QueueError, QueueRefused, RunFinished, retry_pause_s
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import (
    Group,
    Server,
    Ticket,
    TicketFailure,
    TicketReply,
    TicketRequest,
    WorkerReply,
    WorkerReport,
)
from slipstream.rollout_worker.episodes.capacity import Capacity, Reservation
from slipstream.rollout_worker.episodes.limits import EpisodeLimits
from slipstream.rollout_worker.episodes.runner import EpisodeRunner
from slipstream.rollout_worker.episodes.source import EpisodeSource, TicketFailed
from slipstream.rollout_worker.fingerprint import fingerprint_of
from slipstream.rollout_worker.group import GroupRunner
from slipstream.rollout_worker.heartbeat import Heartbeat, Queue, give_back, leave
from slipstream.rollout_worker.inference.engine import Engine
from slipstream.rollout_worker.inference.failures import FailureNotices
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.inference.sampler import Sampler
from slipstream.rollout_worker.task.rewards import build_rewards
from slipstream.rollout_worker.task.row_reader import RowReader
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.teacher import Teacher
from slipstream.rollout_worker.user_code import UserCode, failure_of
from slipstream.rollout_worker.user_code.values import encodable

logger = logging.getLogger(__name__)

_POLL_S = 30.0
_HEARTBEAT_S = 10.0
# Until a server serves there is nothing to do, and only a heartbeat says when one does.
_IDLE_HEARTBEAT_S = 1.0
_FAILURES_BEFORE_PAUSE = 8
# Characters of a teacher's failure by which two are alike: its URL, the route and the status.
_TEACHER_KEY = 100


class UserCodeShutOff(RuntimeError):
    """Too many calls of user code hang, so this process can start no more. The text names them and the remedy."""


class Worker:
    """One worker's loop over tickets.

    Args:
        source: Makes the episodes; it stays open while the worker runs.
        notices: Failures so far; the worker's are added.
        clock: Seconds, monotonic.
        cpu_clock: CPU seconds of the process.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        queue: Queue,
        worker_id: str,
        source: EpisodeSource,
        engine: Engine,
        code: UserCode,
        notices: FailureNotices,
        stream_first_turn: bool = True,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        failures: Counter[str] = Counter()
        self.counters = WorkerReport(
            worker_id,
            ticket_ids=[],
            host=socket.gethostname(),
            pid=os.getpid(),
            capacity=config.worker.episodes,
            failures=failures,
        )
        self.source = source
        self.capacity = Capacity(config.worker.episodes, source.max_open, clock)
        self._config = config
        self._task = task
        self._code = code
        self._queue = queue
        self._id = worker_id
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sleep = sleep
        self._started_at, self._cpu_at_start = clock(), cpu_clock()
        self.heartbeat = Heartbeat(queue.heartbeat, self.report, self._heard, sleep, config.vllm.start_timeout_s)
        self._notices = notices
        notices.on_new = self.heartbeat.now
        self._shut_off, self._why_shut_off = asyncio.Event(), ""
        code.alarm = partial(self._notices.add, "code")
        code.shut_off = self._user_code_is_shut_off
        self._pool = ServerPool(
            self._report_server,
            abort=engine.abort,
            notify=lambda name, text: self._notices.add("server", name, text),
            ask=self.heartbeat.now,
            clock=clock,
        )
        self._sampler = Sampler(engine, self._pool, config, source.chat.stop_token_ids, stream_first_turn, sleep=sleep)
        episodes = EpisodeRunner(
            self._sampler,
            EpisodeLimits.of(config),
            config.worker.episode_timeout_s,
            self.capacity,
            clock,
            self._notices,
            code,
            config.worker.tool_timeout_s,
            failures=failures,
            sleep=sleep,
        )
        own = source.own_rewards
        self._groups = GroupRunner(
            rows=RowReader(task, str(config.task.file.resolve()), code, config.task, images=source.chat.images),
            rewards=build_rewards(
                config, task.rewards, task.reward_weights, code=code, clock=clock, sleep=sleep, own=own
            ),
            source=source,
            episodes=episodes,
            pool=self._pool,
            capacity=self.capacity,
            counters=self.counters,
            notices=self._notices,
            keep_messages=config.worker.keep_messages,
            teacher=Teacher(
                url,
                config.teacher,
                lambda text: self._notices.add("teacher", text[:_TEACHER_KEY], text),
                retry_pause_s,
                sleep,
                config.token_for("worker") if config.teacher.path else None,
                source.chat.tokenizer,
            )
            if (url := config.teacher_url)
            else None,
            credits_turns=config.learner.credit != "episode",
            clock=clock,
        )
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failed_in_a_row = 0
        self._pauses = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Work until the run is finished or `stop` is set; then give tickets back.

        Raises:
            QueueError: The queue cannot be reached.
            ConfigError: The queue refuses this worker.
            UserCodeShutOff: User code can no longer be called; tickets were given back.
        """
        unfinished: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(self._send_heartbeats()), tasks.create_task(self._take_tickets(tasks))]
                stopped, aborts = tasks.create_task(stop.wait()), tasks.create_task(self._pool.run())
                shut_off = tasks.create_task(self._shut_off.wait())
                await asyncio.wait([*loops, stopped, shut_off], return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set() or self._shut_off.is_set():
                    unfinished = [ticket for ticket, task in self._running.items() if not task.cancelling()]
                for task in [*loops, stopped, shut_off, aborts, *self._running.values()]:
                    task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if stop.is_set() or self._shut_off.is_set():
            await leave(self._queue, self._id, unfinished, self._why_shut_off or "the worker was told to stop")
        if self._shut_off.is_set() and not stop.is_set():
            raise UserCodeShutOff(self._why_shut_off)

    def report(self) -> WorkerReport:
        """Return the report for a heartbeat."""
        return msgspec.structs.replace(
            self.counters,
            ticket_ids=list(self._running),
            max_open=self.capacity.max_open,
            **self.capacity.metrics(),
            requests_retried=self._sampler.retries,
            hung_calls=self._code.hung,
            waiting_for_servers=self._pool.waiting,
            elapsed_s=self._clock() - self._started_at,
            cpu_s=self._cpu_clock() - self._cpu_at_start,
            failures=dict(self.counters.failures),
            notices=list(self._notices.found),
            draining=self._pool.draining,
            fleet=self._pool.fleet,
        )

    async def _take_tickets(self, tasks: asyncio.TaskGroup) -> None:
        """Ask for as many tickets as there is room for, until the run is finished."""
        group_size = self._config.rollout.group_size
        while True:
            await self._pool.wait_serving()
            room = await self.capacity.wait_for_room(group_size)
            if self._failed_in_a_row >= _FAILURES_BEFORE_PAUSE:
                # A row has only a few attempts: where nothing succeeds, do not use them up.
                await self._sleep(retry_pause_s(self._pauses))
                self._pauses += 1
                room = await self.capacity.wait_for_room(group_size)
            have, serving = list(self._running), self._pool.known
            request = TicketRequest(self._id, room, _POLL_S, have, serving, self._pool.fleet)
            with self.capacity.asking():
                try:
                    reply = await self.heartbeat.when_registered(partial(self._queue.tickets, request))
                except RunFinished:
                    return
            self._hear_of_servers(reply)
            for ticket in reply.tickets:
                self._begin(ticket, tasks)

    def _begin(self, ticket: Ticket, tasks: asyncio.TaskGroup) -> None:
        """Start a ticket's work. Its slots are taken here, so that the next request does not count on them. They come
        back however the work ends, even before its first line."""
        reservation = self.capacity.begin(ticket.group_size)
        task = tasks.create_task(self._work(ticket, reservation))
        self._running[ticket.id] = task

        def end(_: asyncio.Task[None]) -> None:
            self.capacity.end(ticket.group_size, reservation)
            del self._running[ticket.id]

        task.add_done_callback(end)

    async def _work(self, ticket: Ticket, reservation: Reservation) -> None:
        """Make a ticket's group and submit it. A failure is counted and the ticket given back, also where the group
        cannot be sent. Raises `QueueError`."""
        trace = tracing.TicketTrace(self._pool.run_id, ticket.id)
        with tracing.span("group", trace, ticket=ticket.id, worker=self._id, version=ticket.version) as span:
            try:
                await self._submit(ticket, await self._groups.run(ticket, reservation))
            except TicketFailed as failure:
                span.fail(failure.reason)
                await self._fail(ticket, failure)
            except QueueError:
                raise
            except Exception as error:
                logger.exception("ticket %s failed unexpectedly", ticket.id)
                span.fail(reasons.INTERNAL)
                why = str(failure_of(error, None))
                self._notices.add("ticket", reasons.INTERNAL, f"a ticket failed: {why}")
                await self._fail(ticket, TicketFailed(reasons.INTERNAL, why, retryable=True))

    async def _submit(self, ticket: Ticket, group: Group) -> None:
        try:
            with tracing.span("submit", kind="client"):
                await self.heartbeat.when_registered(partial(self._queue.submit, group))
            self._failed_in_a_row = self._pauses = 0
            self.capacity.cautious = False
        except QueueRefused as refusal:
            tracing.current().fail(reasons.refused(refusal.reason))
            # 410: the queue has ended the ticket itself.
            if refusal.status == 410:
                self.counters.failures[reasons.LOST] += 1
                return
            self._failed(ticket)
            self.counters.failures[reasons.refused(refusal.reason)] += 1
            self._notices.add("ticket", refusal.reason, f"the queue refuses a group: {refusal}")

    def _failed(self, ticket: Ticket) -> None:
        """Count a failure in a row. Evaluations do not count, so that they do not hold up the training."""
        if ticket.kind == "train":
            self._failed_in_a_row += 1
            self.capacity.cautious = True

    async def _fail(self, ticket: Ticket, failure: TicketFailed) -> None:
        self._failed(ticket)
        self.counters.failures[reasons.failed(failure.reason)] += 1
        detail = encodable(str(failure))
        report = TicketFailure(self._id, failure.reason, detail, failure.retryable)
        await give_back(self._queue, ticket.id, report)

    async def _send_heartbeats(self) -> None:
        """Register, then renew tickets and learn of the servers, until the run is finished."""
        self.counters.fingerprint = await fingerprint_of(
            self._config, self._task, self.source.chat.tokenizer, self._code, self.source.tool_schemas
        )
        await self.heartbeat.run()

    def _hear_of_servers(self, reply: TicketReply | WorkerReply) -> None:
        if reply.servers is not None:
            self._pool.update(reply.servers, reply.run, reply.fleet)

    def _heard(self, reply: WorkerReply) -> float:
        self._hear_of_servers(reply)
        for ticket_id in reply.lost_tickets:
            task = self._running.get(ticket_id)
            if task is not None and not task.cancelling():
                self.counters.failures[reasons.LOST] += 1
                task.cancel()
        usual = min(_HEARTBEAT_S, self._config.queue.ticket_timeout_s / 3)
        return usual if self._pool.serving else min(usual, _IDLE_HEARTBEAT_S)

    async def _report_server(self, server: Server) -> None:
        try:
            await self._queue.put_server(server)
        except QueueRefused as refusal:
            logger.warning("the queue does not take %s as %s: %s", server.name, server.state, refusal)
        self.heartbeat.now()

    def _user_code_is_shut_off(self, why: str) -> None:
        self._why_shut_off = why
        self._shut_off.set()
