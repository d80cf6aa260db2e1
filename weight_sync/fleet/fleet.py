"""Follows the queue's registry of servers and runs one task per server, which keeps that server up to date.

No server waits for another. Only questions that concern several servers are decided here: which one is too far behind
(stale), which one is registered under two names, and when enough of them have a version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Protocol, Self

from slipstream.protocol import reasons
from slipstream.protocol.client import QueueError, QueueRefused
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import Server, ServerState
from slipstream.weight_sync.fleet.decisions import Lag, Standing, find_lag
from slipstream.weight_sync.fleet.eligibility import Wanted
from slipstream.weight_sync.fleet.member import Member
from slipstream.weight_sync.fleet.member_state import Compared
from slipstream.weight_sync.fleet.publications import Publications, ServerMetrics
from slipstream.weight_sync.fleet.server_publication import ServerSync
from slipstream.weight_sync.fleet.snapshots import Snapshots
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.transports.base import Transport

logger = logging.getLogger(__name__)

# Seconds between reads of the registry, which shows servers that join, leave or register again.
READ_EVERY_S = 1.0

# Seconds for which a server waits for a snapshot while others publish older ones, and which these then have to end.
MAX_ROOM_WAIT_S = 1.0
GIVE_UP_WITHIN_S = 5.0

# Pause after a failure of the queue, which concerns all servers.
QUEUE_PAUSE_S = 1.0

# Unexpected failures in a row of one server's task after which the learner ends; the pause doubles with each.
MAX_UNEXPECTED_FAILURES = 6
FAILURE_PAUSE_S = 2.0


class FleetBroken(RuntimeError):
    """The task of one server failed unexpectedly `MAX_UNEXPECTED_FAILURES` times in a row."""


class Registry(Protocol):
    """Knows the servers of a run. The queue's client is one. Each method may raise `QueueError`."""

    async def servers(self) -> list[Server]: ...

    async def put_server(self, server: Server, session: int | None = None) -> Server:
        """Note a server's state and version. Returns what is known of it then."""
        ...

    async def waiting(self, session: int, what: str | None) -> Any:
        """Note what the publisher waits for; None ends the wait."""
        ...


class Fleet:
    """All servers that the queue knows. Use it as an async context manager around `run`.

    Attributes:
        members: The servers, by name.
        publications: Record of each version.
        queue_error: The queue's newest error, None while it answers.
        changed: Set, and replaced by a new event, whenever a server or the queue's health has changed.
    """

    def __init__(
        self,
        config: RunConfig,
        registry: Registry,
        make_transport: Callable[[], Transport],
        session: Callable[[], int | None],
        snapshots: Snapshots,
        on_failure: Callable[[BaseException], None],
        run_id: Callable[[], str] = lambda: "",
        wanted: Wanted | None = None,
    ) -> None:
        """Make a fleet without members.

        Args:
            make_transport: Makes a transport for each connection to a server.
            session: Returns the learner's session at the queue, None before it is known.
            snapshots: Source of the newest weights; its `freed` is set here.
            on_failure: Called with the error that ends the fleet's work.
            run_id: Returns the run's id, "" before it is known.
            wanted: What servers must have; by default what the run needs to sample from them.
        """
        self.members: dict[str, Member] = {}
        self.publications = Publications(config.weight_sync.quorum)
        self.queue_error: QueueError | None = None
        self.changed = asyncio.Event()
        self._config = config
        self._wanted = wanted or Wanted.of(config)
        self._registry = registry
        self._make_transport = make_transport
        self._session = session
        self._run_id = run_id
        self._snapshots = snapshots
        snapshots.freed = self._wake_all
        self._on_failure = on_failure
        self._boots: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._read = asyncio.Event()
        self._controls: dict[str, AsyncExitStack] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all members while connections are open: a task that ends resumes its server, or quarantines it."""
        for name in [*self.members]:
            self._remove(name)
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    def handed(self, version: int, snapshot_s: float) -> None:
        """Start the publication of a version whose snapshot is filled.

        Args:
            snapshot_s: Seconds that the learner waited for the copy.
        """
        self.publications.handed(version, snapshot_s)
        self._read.set()
        for member in self.members.values():
            member.wake(at_once=self.publications.counted is None)

    async def run(self) -> None:
        """Follow the registry and take servers that are too far behind out of service. Runs until cancelled."""
        while True:
            self._read.clear()
            try:
                await self._read_registry()
                for member in [*self.members.values()]:
                    await member.handle(Compared(time.monotonic(), self._lag_of(member.standing)))
                self._free_snapshots()
                self._note_recovery()
            except QueueError as error:
                self._note_queue_error(error)
            except Exception as error:
                # Without this task no server could join, and the run would stand still without a cause.
                logger.exception("the registry of servers cannot be followed")
                self._on_failure(error)
                return
            behind = any(member.state.process.behind_since is not None for member in self.members.values())
            with suppress(TimeoutError):  # a grace period is short
                async with asyncio.timeout(min(READ_EVERY_S, 0.1) if behind else READ_EVERY_S):
                    await self._read.wait()

    def describe_waits(self) -> str:
        """Describe each server that is not up to date, for people."""
        waiting = [
            f"{name} ({', '.join(filter(None, [of.server.state, of.wait_text]))})"
            for name, of in sorted((name, member.state) for name, member in self.members.items())
            if not of.up_to_date
        ]
        return "; ".join(waiting) or ("all servers have it" if self.members else "the queue knows no server")

    def describe_missing(self, version: int) -> str:
        """Explain for each server without `version` why it does not have it, for an error."""
        failed = self.publications.why_failed(version)
        missing = [
            failed.get(name) or f"{name} is {of.server.state}: {of.start_text or of.obstacle or of.server.url}"
            for name, of in sorted((name, member.state) for name, member in self.members.items())
            if of.process.version != version
        ]
        return "; ".join(missing) or "the queue knows no server"

    def all_failed(self, times: int) -> bool:
        """Return whether every server answers and has failed `times` times in a row."""
        states = [member.state for member in self.members.values()]
        return bool(states) and all(of.answers and of.process.failures >= times for of in states)

    @property
    def paused_by_user(self) -> bool:
        """Whether a person has paused one of the servers."""
        return any(member.state.process.by_person for member in self.members.values())

    # The methods of `FleetView`, which members call.

    def claim(self, boot: str, name: str) -> str | None:
        if not boot:
            return None
        other = self._boots.get(boot, name)
        if other != name and other in self.members:
            return f"it is the same server process as {other}: remove one of the two names"
        self._boots = {of: who for of, who in self._boots.items() if who != name and who in self.members}
        self._boots[boot] = name
        return None

    def proven(self, name: str, version: int, metrics: ServerMetrics) -> None:
        served = {name: of.state.server.version for name, of in self.members.items()}
        if self.publications.proven(name, version, metrics, served):
            logger.debug("version %d counts: %s have it", version, self.publications.reached(version))
        self._notify()
        self._read.set()

    def would_be_stale(self, name: str, version: int, took_s: float) -> bool:
        found = self._lag_of(Standing(name, ServerState.SERVING, version))
        return found is not None and found.too_far and took_s > found.grace_s

    def _lag_of(self, standing: Standing) -> Lag | None:
        standings = [member.standing for member in self.members.values()]
        newest = self._snapshots.newest
        version = newest.version if newest is not None else 0
        return find_lag(standing, standings, version, self._config.queue.max_staleness)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _read_registry(self) -> None:
        """Add and remove members to follow the registry, and hand them the changes that others made there."""
        updates = {name: member.updates for name, member in self.members.items()}
        known = {server.name: server for server in await self._registry.servers()}
        for name, server in known.items():
            member = self.members.get(name)
            if name in self._leaving:
                continue  # another server of this name: it is added once the one before has gone
            if member is not None and member.state.server.url != server.url:
                self._remove(name)
            elif member is None:
                await self._add(server)
            elif member.updates == updates.get(name) and not member.updates % 2:
                # Else our own update may have been on its way while the registry was read (odd: it still is).
                member.take_registration(server)
        for name in [*self.members]:
            if name not in known and name not in self._leaving:
                self._remove(name)

    async def _add(self, server: Server) -> None:
        config = self._config
        stack = self._controls[server.name] = AsyncExitStack()
        control = await stack.enter_async_context(
            ServerControl(server.url, config.weight_sync.timeout_s, config.token_for("learner"), self._run_id)
        )
        sync = ServerSync(
            control, self._make_transport, config.probe_tolerance, config.served_dtype, config.served_quantised
        )
        member = Member(server, sync, self._put, self._snapshots, self.publications, self, config, self._wanted)
        self.members[server.name] = member
        self._tasks[server.name] = asyncio.create_task(
            run_forever(member, self._note_queue_error, self._on_failure), name=f"server {server.name}"
        )

    def _remove(self, name: str) -> None:
        """End a member in the background, so that a server that hangs holds up no other."""
        if name not in self._leaving:
            self._leaving[name] = asyncio.create_task(self._end_member(name), name=f"server {name} leaves")

    async def _end_member(self, name: str) -> None:
        task, member = self._tasks.pop(name), self.members[name]
        try:
            task.cancel()
            await asyncio.wait([task])
            await member.leave()
            await self._controls.pop(name).aclose()
        finally:
            del self.members[name], self._leaving[name]
            self._notify()
            self._read.set()

    async def _put(self, server: Server) -> Server:
        return await self._registry.put_server(server, self._session())

    def _free_snapshots(self) -> None:
        """End publications of old versions whose snapshots keep other servers from the newest."""
        names = self._snapshots.held_up(MAX_ROOM_WAIT_S)
        for name in names:
            if (member := self.members.get(name)) is not None:
                member.give_up()
        if names and self._snapshots.held_up(MAX_ROOM_WAIT_S + GIVE_UP_WITHIN_S):
            version = self._snapshots.forget_oldest()
            logger.error("%s did not let go of version %d within %g s", ", ".join(names), version, GIVE_UP_WITHIN_S)

    def _wake_all(self) -> None:
        for member in self.members.values():
            member.wake()

    def _note_queue_error(self, error: QueueError) -> None:
        if isinstance(error, QueueRefused) and error.reason == reasons.SESSION_SUPERSEDED:
            self._on_failure(error)
        if self.queue_error is None:
            logger.warning("the servers cannot be brought up to date: %s", error)
        self.queue_error = error
        self._notify()

    def _note_recovery(self) -> None:
        if self.queue_error is not None:
            logger.info("the queue answers again: the servers are brought up to date")
        self.queue_error = None


async def run_forever(
    member: Member, on_queue_error: Callable[[QueueError], None], on_failure: Callable[[BaseException], None]
) -> None:
    """Run one server's task again after each error, with a pause. Runs until cancelled.

    An unexpected error holds up no other server. After `MAX_UNEXPECTED_FAILURES` in quick succession the learner ends:
    a run whose only server is never updated would stand still, and nobody would know why.

    Args:
        on_queue_error: Called with each error of the queue.
        on_failure: Called with `FleetBroken` at the end.
    """
    failures = 0
    while True:
        began = time.monotonic()
        try:
            await member.run()
        except QueueError as error:
            on_queue_error(error)
            pause_s = QUEUE_PAUSE_S
        except Exception as error:
            failures = failures + 1 if time.monotonic() - began < 60 else 1
            logger.exception("%s cannot be brought up to date (failure %d)", member.name, failures)
            if failures == MAX_UNEXPECTED_FAILURES:
                failure = FleetBroken(
                    f"{member.name} could not be brought up to date {failures} times in a row; the last time: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                on_failure(failure)
                return
            pause_s = FAILURE_PAUSE_S * 2**failures
        await asyncio.sleep(pause_s)
