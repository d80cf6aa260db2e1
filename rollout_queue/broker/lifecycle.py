"""The life of a queue: it stands by while another one is active, loads the store, keeps deadlines, and ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from slipstream.protocol.addresses import normal_url
from slipstream.protocol.config import ConfigError
from slipstream.protocol.history import Row, reported_row
from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.status import Stall, Status
from slipstream.protocol.versions import new_run_id
from slipstream.rollout_queue.broker import status
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.clock import TICK_S
from slipstream.rollout_queue.ledger import servers
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import Decision, Refusal
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_queue.store import check_beside_run
from slipstream.rollout_queue.store.base import StoreError
from slipstream.rollout_queue.store.changes import Changes

logger = logging.getLogger(__name__)

# A queue that stands by asks so often whether the active one has gone; an active one commits as often, seconds.
ALIVE_S = 0.5

# A queue that ends waits so long for its store to take the last commit, seconds.
_LAST_COMMIT_S = 5.0

# The status is looked at so often for the history and open pages, seconds; or so many times less often than that takes.
_LOOK_S, _SPARING = 1.0, 50


@asynccontextmanager
async def running(broker: Broker) -> AsyncIterator[None]:
    """Let a broker serve as the active queue of its store, or stand by until the one that is active has gone.

    The store is closed at the end. What keeps the queue from starting is in `broker.failure`.
    """
    settled = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(_run(broker, settled))
            await settled.wait()
            yield
            broker.ready = False
            with suppress(Refusal, TimeoutError):
                async with asyncio.timeout(_LAST_COMMIT_S):
                    await broker.writer.flushed()
            work.cancel()
    finally:
        broker.history.close()
        broker.writer.close(*([broker.recorder.close] if broker.recorder is not None else []))


async def _run(broker: Broker, settled: asyncio.Event) -> None:
    """Become the active queue, load the store, and keep it until cancelled or until something fails.

    Args:
        settled: Set once the broker can answer: as the active queue, as one that stands by, or why it failed.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_tick(broker))
            while (active := await broker.writer.call(broker.store.acquire)) is not None:
                _note_active(broker, active)
                settled.set()
                await asyncio.sleep(ALIVE_S)
            await _load(broker)
            _note_active(broker, None)
            broker.ready = True
            _register_servers(broker)
            settled.set()
            tasks.create_task(_expire_when_due(broker))
            tasks.create_task(_show_alive(broker))
            tasks.create_task(_keep_history(broker))
    except ExceptionGroup as errors:
        error = errors.exceptions[0]
        if isinstance(error, ConfigError):
            broker.fail(error)
        elif broker.failure is None:
            # Without deadlines, or half loaded, it would keep everyone waiting.
            logger.exception("the queue ends, since one of its own tasks failed")
            broker.fail(StoreError(f"the queue failed: {error!r}; start it again, and report the lines above"))
    finally:
        settled.set()


def _note_active(broker: Broker, url: str | None) -> None:
    """Note which queue is active: the one at a URL, or, with None, this one."""
    if url is not None and url != broker.active_url:
        logger.info("standing by for the queue at %s", url)
    elif url is None and broker.active_url is not None:
        logger.info("this queue is active now, after the one at %s", broker.active_url)
    broker.active_url = url


async def _load(broker: Broker) -> None:
    """Fill the broker's memory from the store. Raises `ConfigError` for a store that is not the run's."""
    contents = await broker.writer.call(broker.store.load)
    check_beside_run(broker.config, contents.run)
    if not contents.run.id:
        contents.run = msgspec.structs.replace(contents.run, id=new_run_id(broker.config.run.name))
        await broker.writer.call(broker.store.commit, Changes(run=contents.run))
    learner = broker.config.learner
    if contents.run.finished and (learner.epochs is not None or contents.run.step < learner.steps):
        # The run may be resumed with more steps; with `epochs` the data set decides how many. A worker that is up
        # before the learner must not end.
        contents.run = msgspec.structs.replace(contents.run, finished=False)
    if contents.run.finished:
        broker.log_finished()
    broker.writer.begin(contents.run.pruned_below)
    broker.ledger = Ledger(broker.config, contents, broker.now)
    broker.fleet = ServerRegistry(contents.servers)
    broker.early_failures.begin(broker.ledger.ever_accepted)
    broker.spans.load([*contents.live, *contents.evaluation_tickets], broker.clock.wall())


def _register_servers(broker: Broker) -> None:
    """Register the servers of the run file that the run has never had. Raises `ConfigError` where there is no room."""
    for name, given in broker.config.server_names.items():
        url = normal_url(given)
        if broker.fleet.has_had(name, url):
            continue
        known = broker.fleet.get(name)
        try:
            if known is not None and known.state is ServerState.DRAINING:
                # It has another address, which the run file names no more. It would keep the name taken.
                broker.apply(servers.remove(broker.fleet, broker.ledger, [name]))
            broker.apply(servers.put(broker.fleet, broker.ledger, Server(name, url), broker.clock.wall()))
        except Refusal as refusal:
            if broker.failure is not None:
                return
            raise ConfigError(
                f"vllm.servers: server {name} at {url} is refused: {refusal}; name fewer, or begin another run.name"
            ) from refusal


async def _tick(broker: Broker) -> None:
    """Read the clock often, as `AwakeClock` needs, and note how late the loop is."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        broker.observations.histograms.loop_lag(max(0.0, loop.time() - due))
        _ = broker.now


async def _expire_when_due(broker: Broker) -> None:
    """End what is overdue, and remove servers that have drained."""
    while broker.failure is None:
        due = min(broker.ledger.next_deadline(broker.now), broker.drain_due())
        await asyncio.sleep(max(0.05, due - broker.now))
        with suppress(Refusal):  # `on_failure` has told the service that the store failed
            await broker.expire()
            await broker.remove_drained()


async def _keep_history(broker: Broker) -> None:
    """Add the status to the run's history, and tell the pages that are open. A fault of it does not end the queue."""
    failed, shown = False, 0
    for load in (broker.history.load, broker.trained.look):
        try:
            await asyncio.to_thread(load)
        except Exception:
            logger.exception("the page does not show what was before")
    if broker.history.newest_at is not None:  # by a clock that has been set back since
        broker.clock.not_before(broker.history.newest_at)
    try:
        while broker.failure is None:
            began = time.perf_counter()
            try:
                shown = await _tell_pages(broker, shown)
            except Exception:
                if not failed:
                    logger.exception("the page and the run's history miss something from now on")
                failed = True
            spent = time.perf_counter() - began
            if broker.history.may_be_full:
                await asyncio.to_thread(broker.history.make_room)
            await asyncio.sleep(max(_LOOK_S, _SPARING * spent))
    finally:
        try:
            broker.history.add(_last_status(broker), broker.clock.wall(), is_last=True)
        except Exception:
            logger.exception("the run's history lacks its end")


def tell_end(broker: Broker) -> None:
    """Send open pages the last status: one that says that the run has finished would come too late else."""
    if broker.ready:
        broker.viewers.tell("status", _last_status(broker))


def _last_status(broker: Broker) -> Status:
    """Return the status with which a queue ends: who still waits, and for what, ends with it."""
    return msgspec.structs.replace(status.assemble(broker), waits=[], stall=Stall(False, 0.0, None), limit=None)


async def _tell_pages(broker: Broker, shown: int) -> int:
    """Tell the pages what is new.

    Args:
        shown: Groups of whose rollouts they were told.

    Returns:
        `shown` from now on.
    """
    history, viewers = broker.history, broker.viewers
    if (clock := broker.clock.describe_step()) is not None:
        logger.warning("%s", clock)
        # Each is news, even if only its figures differ.
        broker.observations.notices.say("clock", clock, broker.now, key=f"at {broker.now:.0f}")
    now, failure = status.assemble(broker), history.failure
    change = history.add(now, broker.clock.wall(), _steps_before(broker))
    if history.failure is not None and failure is None:
        logger.error("%s", history.failure)
        broker.observations.notices.say("history", history.failure, broker.now, key="history")
    viewers.tell("status", now)
    viewers.tell("time", change.time)
    for step in change.steps:
        viewers.tell("step", step)
    for event in change.events:
        viewers.tell("event", event)
    shown, rollouts = broker.observations.recent.newer(shown)
    # Those that have trained replace on the page what it had of them.
    for new in (rollouts, await asyncio.to_thread(broker.trained.look)):
        if new:
            viewers.tell("rollouts", new)
    return shown


def _steps_before(broker: Broker) -> list[Row]:
    """Return the steps since the last look, but for the newest one, which the status has."""
    reports, wall = broker.observations.newest_reports, broker.clock.wall()
    found = [reported_row(wall - (broker.now - at), report) for at, report in reports if report.metrics][:-1]
    reports.clear()
    return found


async def _show_alive(broker: Broker) -> None:
    """Commit often, if only nothing, so that no queue that stands by takes this one for dead."""
    with suppress(Refusal):  # the store has failed
        while True:
            await asyncio.sleep(ALIVE_S)
            broker.writer.add(Decision(), {})
