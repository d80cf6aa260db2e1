"""All servers that the queue knows, each with a member and a task of its own; the registry is read again and again.

What concerns more than one server is decided here: which is too far behind another (stale), which is registered twice,
and when enough of them have a version.

Keeps one server's task going, whatever ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

from protocol import reasons
from protocol.client import QueueClient, QueueError, QueueRefused
from protocol.config import RunConfig
from protocol.messages import Server, ServerState
from weight_sync.fleet.decisions import Behind, Standing, behind
from weight_sync.fleet.eligibility import Wanted
from weight_sync.fleet.member import Member
from weight_sync.fleet.publications import Publications, ServerFigures
from weight_sync.fleet.server_publication import ServerSync
from weight_sync.fleet.snapshots import Snapshots
from weight_sync.server.control import ServerControl
from weight_sync.transports.base import Transport

logger = logging.getLogger(__name__)

# After a failure of the queue, which concerns all servers.
QUEUE_PAUSE_S = 1.0

# Failures in a row that nobody foresaw, of one server's task, after which it is a bug that ends the learner.
MAX_BUGS = 6

BUG_PAUSE_S = 2.0


class FleetBroken(RuntimeError):
    """A server's task failed again and again in a way that nobody foresaw."""


async def run_forever(
    member: Member, troubled: Callable[[QueueError], None], on_failure: Callable[[BaseException], None]
) -> None:
    """A bug in one server's task holds up no other; one that comes back at once, again and again, ends the learner:
    a run whose only server is not brought up to date would stand still, and nobody would know why."""
    bugs = 0
    while True:
        began = time.monotonic()
        try:
            await member.run()
        except QueueError as error:
            troubled(error)
            pause_s = QUEUE_PAUSE_S
        except Exception as error:
            bugs = bugs + 1 if time.monotonic() - began < 60 else 1
            logger.exception("%s cannot be brought up to date (failure %d)", member.name, bugs)
            if bugs == MAX_BUGS:
                failure = FleetBroken(
                    f"{member.name} could not be brought up to date {bugs} times in a row; the last time: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                on_failure(failure)
                return
            pause_s = BUG_PAUSE_S * 2**bugs
        await asyncio.sleep(pause_s)


# How often the registry is read, for servers that join, leave or register anew.
READ_EVERY_S = 1.0

# How long a server waits for room that others take up with an older version, and how long they have to give it free.
HELD_S = 1.0

LET_GO_S = 5.0


class Fleet:
    """Use it as an async context manager around `run`. `session` tells the learner's session at the queue, `run_id` the
    run's id, "" before they are known; `on_failure` is called with what ends the fleet's work."""

    def __init__(
        self,
        config: RunConfig,
        client: QueueClient,
        make_transport: Callable[[], Transport],
        session: Callable[[], int | None],
        snapshots: Snapshots,
        on_failure: Callable[[BaseException], None],
        run_id: Callable[[], str] = lambda: "",
    ) -> None:
        self.members: dict[str, Member] = {}
        self.publications = Publications(config.weight_sync.quorum)
        self.trouble: QueueError | None = None
        self.changed = asyncio.Event()
        self._config = config
        self._wanted = Wanted.of(config)
        self._client = client
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
        """As they end, tasks resume servers, or take them out of service, for which they need the connections."""
        for name in [*self.members]:
            self._leaves(name)
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    def handed(self, version: int, snapshot_s: float) -> None:
        """A version is there to be published."""
        self.publications.handed(version, snapshot_s)
        self._read.set()
        for member in self.members.values():
            if self.publications.counted is None:
                member.try_afresh()
            member.wake()

    async def run(self) -> None:
        """For ever: follow the registry, and take servers that are too far behind out of service."""
        while True:
            self._read.clear()
            try:
                await self._follow()
                await self._judge()
                self._make_room()
                self._heals()
            except QueueError as error:
                self._is_troubled(error)
            except Exception as error:
                # Nobody would follow the registry any more, and a run without a server would stand still.
                logger.exception("the registry of servers cannot be followed")
                self._on_failure(error)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(READ_EVERY_S, self._next_judgement_s())):
                    await self._read.wait()

    def standing(self) -> str:
        """How each server that is not up to date stands, for people."""
        said = [
            f"{name} ({', '.join(filter(None, [member.server.state, member.told_wait]))})"
            for name, member in sorted(self.members.items())
            if not member.up_to_date
        ]
        return "; ".join(said) or ("all servers have it" if self.members else "the queue knows no server")

    def reasons(self, version: int) -> str:
        """Why the servers that do not have a version do not, for an error."""
        failed = self.publications.why_failed(version)
        said = [
            failed.get(name)
            or f"{name} is {member.server.state}: {member.not_up or member.waits_for or member.server.url}"
            for name, member in sorted(self.members.items())
            if member.version != version
        ]
        return "; ".join(said) or "the queue knows no server"

    def all_failed(self, times: int) -> bool:
        """Whether every server answers, and has failed so often in a row."""
        return bool(self.members) and all(
            member.answers and member.failures >= times for member in self.members.values()
        )

    @property
    def paused_by_person(self) -> bool:
        return any(member.persons_pause.stands for member in self.members.values())

    # What members ask.

    def claim(self, boot: str, name: str) -> str | None:
        if not boot:
            return None
        other = self._boots.get(boot, name)
        if other != name and other in self.members:
            return f"it is the same server process as {other}: remove one of the two names"
        self._boots = {of: who for of, who in self._boots.items() if who != name and who in self.members}
        self._boots[boot] = name
        return None

    def proven(self, member: Member, version: int, figures: ServerFigures) -> None:
        served = {name: of.server.version for name, of in self.members.items()}
        if self.publications.proven(member.name, version, figures, served):
            logger.debug("version %d counts: %s have it", version, self.publications.reached(version))
        self._news()
        self._read.set()

    def would_be_stale(self, member: Member, version: int, took_s: float) -> bool:
        found = self._behind(Standing(member.name, ServerState.SERVING, version))
        return found is not None and found.too_far and took_s > found.grace_s

    def _behind(self, standing: Standing) -> Behind | None:
        standings, newest = [member.standing for member in self.members.values()], self._snapshots.newest
        version = newest.version if newest is not None else 0
        return behind(standing, standings, version, self._config.queue.max_staleness)

    def _news(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _follow(self) -> None:
        """Take the registry over."""
        told = {name: member.at_queue.told for name, member in self.members.items()}
        known = {server.name: server for server in await self._client.servers()}
        for name, server in known.items():
            member = self.members.get(name)
            if name in self._leaving:
                continue  # another server of this name: it comes when the one before has gone
            if member is not None and member.server.url != server.url:
                self._leaves(name)
            elif member is None:
                await self._came(server)
            elif (
                member.at_queue.told == told.get(name)
                and not member.at_queue.told % 2
                and _differs(member.server, server)
            ):
                member.registered_anew(server)
        for name in [*self.members]:
            if name not in known and name not in self._leaving:
                self._leaves(name)

    async def _came(self, server: Server) -> None:
        section = self._config.weight_sync
        config = self._config
        stack = self._controls[server.name] = AsyncExitStack()
        control = await stack.enter_async_context(
            ServerControl(server.url, section.timeout_s, config.token_for("learner"), self._run_id)
        )
        sync = ServerSync(
            control, self._make_transport, config.probe_tolerance, config.served_dtype, config.served_quantised
        )
        member = Member(
            server, sync, self._put, self._snapshots, self.publications, self, section.timeout_s, self._wanted
        )
        self.members[server.name] = member
        self._tasks[server.name] = asyncio.create_task(
            run_forever(member, self._is_troubled, self._on_failure), name=f"server {server.name}"
        )

    def _leaves(self, name: str) -> None:
        """End a member in the background: a server that hangs must not hold up the others."""
        if name not in self._leaving:
            self._leaving[name] = asyncio.create_task(self._left(name), name=f"server {name} leaves")

    async def _left(self, name: str) -> None:
        task, member = self._tasks.pop(name), self.members[name]
        try:
            task.cancel()
            await asyncio.wait([task])
            await member.leave()
            await self._controls.pop(name).aclose()
        finally:
            del self.members[name], self._leaving[name]
            self._news()
            self._read.set()

    async def _put(self, server: Server) -> Server:
        return await self._client.put_server(server, self._session())

    async def _judge(self) -> None:
        """Take servers out of service that hold admission for the others (stale)."""
        now = time.monotonic()
        for member in [*self.members.values()]:
            found = self._behind(member.standing)
            if found is None:
                member.behind_since = None
                continue
            member.behind_since = now if member.behind_since is None else member.behind_since
            if found.too_far and now - member.behind_since >= found.grace_s:
                doing = f"; it waits for {member.waits_for}" if member.waits_for else ""
                reason = f"{found.versions} versions behind, unlike {found.ahead}{doing}"
                with suppress(QueueRefused):
                    await member.at_queue.tell(ServerState.STALE, None, reason)

    def _make_room(self) -> None:
        """Servers that hold an old version, and so keep others from the newest, have to let go of it."""
        names = self._snapshots.held_up(HELD_S)
        for name in names:
            if (member := self.members.get(name)) is not None:
                member.under_way.let_go()
        if names and self._snapshots.held_up(HELD_S + LET_GO_S):
            version = self._snapshots.forget_oldest()
            logger.error("%s did not let go of version %d within %g s", ", ".join(names), version, LET_GO_S)

    def _wake_all(self) -> None:
        for member in self.members.values():
            member.wake()

    def _next_judgement_s(self) -> float:
        """Soon, while somebody's grace runs."""
        return 0.1 if any(member.behind_since is not None for member in self.members.values()) else READ_EVERY_S

    def _is_troubled(self, error: QueueError) -> None:
        if isinstance(error, QueueRefused) and error.reason == reasons.SESSION_SUPERSEDED:
            self._on_failure(error)
        if self.trouble is None:
            logger.warning("the servers cannot be brought up to date: %s", error)
        self.trouble = error
        self._news()

    def _heals(self) -> None:
        if self.trouble is not None:
            logger.info("the queue answers again: the servers are brought up to date")
        self.trouble = None


def _differs(ours: Server, theirs: Server) -> bool:
    return (ours.state, ours.version, ours.changed_at) != (theirs.state, theirs.version, theirs.changed_at)
