"""One server of the fleet and its task: look whether it answers, bring it to the newest version, say how it stands.

No other server, and no learner, waits for it. What it is told is what the queue is told, one line of the log for each
state. A server that starts or restarts (another `boot`), or holds weights that are not ours, is joining, whatever it
was before (F16); one that another run's learner controls is down while it does; one whose proof fails is quarantined
(I5), as is one that is left paused (I6); one that does not answer for a while is down. Each is tried again.

What one server's task asks of all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from protocol.client import QueueRefused
from protocol.messages import Server, ServerState
from weight_sync.fleet.decisions import Standing, UserPause, retry_pause_s
from weight_sync.fleet.eligibility import Eligibility, Wanted, what_became
from weight_sync.fleet.publications import Publications, ServerFigures
from weight_sync.fleet.queue_status import Put, QueueReporter, way_to
from weight_sync.fleet.server_publication import LOOK_EVERY_S, PUBLISH_ERRORS, PublicationAttempt, ServerSync
from weight_sync.fleet.snapshots import Snapshots
from weight_sync.server.answers import EngineState
from weight_sync.server.cancellation import shielded
from weight_sync.server.control import LOOK_TIMEOUT_S, NO_ANSWER, ControlError
from weight_sync.server.proof import ProofFailed
from weight_sync.weights.snapshot import Snapshot

if TYPE_CHECKING:
    pass


class FleetView(Protocol):
    """What a member asks of the fleet."""

    def claim(self, boot: str, name: str) -> str | None:
        """Why the server process of this `boot` cannot have this name: it is in the fleet under another one."""

    def proven(self, member: Member, version: int, figures: ServerFigures) -> None:
        """A server has a version."""

    def would_be_stale(self, member: Member, version: int, took_s: float) -> bool:
        """Whether a server that served this version, which took so long, would be too far and too long behind."""


logger = logging.getLogger(__name__)

# One that serves and does not answer for so long is down: requests to it would hang.
DOWN_AFTER_S = 10.0

_S = ServerState


class Member:
    """`version`: what this learner proved on its present process, None before.

    For people: `waits_for`, what keeps it from being up to date; `not_up`, how it shows that it is not up yet.
    `failures`: publications in a row that failed.
    """

    def __init__(
        self,
        server: Server,
        sync: ServerSync,
        put: Put,
        snapshots: Snapshots,
        publications: Publications,
        others: FleetView,
        timeout_s: float,
        wanted: Wanted,
    ) -> None:
        self.at_queue = QueueReporter(server, put)
        self.version: int | None = None
        self.waits_for: str | None = None
        self.not_up: str | None = None
        self.failures = 0
        self.persons_pause = UserPause(self.at_queue)
        self.answers = False
        self.behind_since: float | None = None
        self._sync = sync
        self._snapshots = snapshots
        self._publications = publications
        self._others = others
        self._timeout_s = timeout_s
        self._barred = Eligibility(sync.control, wanted)
        self._boot: str | None = None
        # Those that the server may hold by what was done to it.
        self._labels: set[str] = set()
        self._no_room = False
        self._took_s = 0.0
        self._silent_since: float | None = None
        self._next_try = 0.0
        self._wake = asyncio.Event()
        self.under_way = PublicationAttempt(sync.control, self._heard_beside, timeout_s)

    @property
    def server(self) -> Server:
        """As the queue knows it."""
        return self.at_queue.server

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def standing(self) -> Standing:
        return Standing(self.name, self.server.state, self.server.version, self._took_s)

    @property
    def told_wait(self) -> str | None:
        return self.not_up or (f"waits for {self.waits_for}" if self.waits_for else None)

    @property
    def up_to_date(self) -> bool:
        newest = self._snapshots.newest
        if self.server.state is _S.DRAINING:
            return True
        return self.server.state is _S.SERVING and (newest is None or self.version == newest.version)

    def wake(self) -> None:
        """There is something new: a version, or a change of the registry."""
        self._wake.set()

    def registered_anew(self, server: Server) -> None:
        """The queue says that it starts, or somebody else changed its state."""
        if server.state is _S.JOINING:
            self._is_new_process()
        self.at_queue.server = server
        self.wake()

    def try_afresh(self) -> None:
        """Failures of before count no more."""
        self.failures, self._next_try = 0, 0.0
        self.wake()

    async def run(self) -> None:
        """For ever; raises `QueueError` where the queue fails, and whatever nobody foresaw."""
        while True:
            self._wake.clear()
            self._no_room = False
            state = await (self.at_queue.settled() if self.server.state is _S.DRAINING else self._look())
            newest, due = self._snapshots.newest, time.monotonic() >= self._next_try
            if state is not None and newest is not None and not await self._paused_by_person(state):
                if self.version == newest.version and self.persons_pause.was_all(state, newest.label):
                    await self.persons_pause.ended(newest.version)
                elif due and not self.up_to_date:
                    await self._bring(state)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # a call that ended in the same moment turned it into its own error
            await self._pause()

    async def leave(self) -> None:
        """Let go of the connection, and of the server."""
        await self._sync.disconnect()
        await self._sync.control.goodbye()

    async def _look(self) -> EngineState | None:
        """How the server is; None where its engine does not answer."""
        began = time.monotonic()
        if self.waits_for is None and not self.up_to_date:
            self.waits_for = "an answer of its engine"
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                state = await self._sync.control.state()
        except (ControlError, TimeoutError) as error:
            if isinstance(error, ControlError) and error.unconnected and self.server.state is _S.JOINING:
                await self._is_not_up(f"{self.server.url} does not answer yet ({error.unconnected})")
            else:
                await self._does_not_answer(
                    str(error) or f"{self.server.url}: no answer within {LOOK_TIMEOUT_S:g} s", began
                )
            return None
        if not state.alive:
            # Its front answers alone, and knows neither weights nor boot: it may be in a long step, and go on.
            why = f"{self.server.url}: {state.reason or NO_ANSWER}"
            await self._does_not_answer(why, began, at_once=state.reason not in (None, NO_ANSWER))
            return None
        self.at_queue.transport = way_to(state, self._snapshots.newest)
        if not self.answers:
            self.answers, self.not_up, self._silent_since = True, None, None
            self._next_try = 0.0
        if await self._is_barred(state):
            return None
        ours = None if self.version is None else self._labels
        if (lost := what_became(state, self._boot, ours, self._sync.control.run_id)) is not None:
            logger.warning("%s at %s: %s", self.name, self.server.url, lost)
            self._is_new_process()
            await self.at_queue.try_to_tell(_S.JOINING, None, lost)
        self._boot = state.boot
        if self.up_to_date:
            self.waits_for = None
        return state

    async def _is_barred(self, state: EngineState) -> bool:
        """Whether the run may not use the server: down to us while that is so, as the queue is told once."""
        reason = await self._barred.look(state, self._others.claim(state.boot, self.name))
        if reason is None:
            return False
        self.waits_for = reason
        if self.server.state is not _S.DOWN or self._barred.is_news:
            await self.at_queue.try_to_tell(_S.DOWN, None, reason)
            self._is_new_process()
        return True

    async def _is_not_up(self, why: str) -> None:
        """Nobody listens there yet."""
        self.answers, self.not_up, self.waits_for = False, why, "its start"
        if self.server.reason is None:
            await self.at_queue.try_to_tell(_S.JOINING, None, why)

    async def _does_not_answer(self, why: str, asked: float, at_once: bool = False) -> None:
        """asked: when, as `time.monotonic` has it; at_once: it will not answer again before it is started anew."""
        self.answers, self.not_up = False, None
        self._silent_since = asked if self._silent_since is None else self._silent_since
        self.waits_for = f"an answer of its engine ({why})"
        state = self.server.state
        if state in (_S.JOINING, _S.DOWN):
            if state is _S.JOINING and self.server.reason is None:
                await self.at_queue.try_to_tell(_S.JOINING, None, f"not up yet: {why}")
        elif time.monotonic() - self._silent_since >= DOWN_AFTER_S or at_once:
            await self.at_queue.try_to_tell(_S.DOWN, None, f"its engine does not answer: {why}")

    async def _paused_by_person(self, state: EngineState) -> bool:
        if await self.persons_pause.stands_in(state):
            self.waits_for = "a person's POST /resume"
        return self.persons_pause.stands

    async def _bring(self, state: EngineState) -> None:
        """Publish the newest version to the server, and tell the queue what came of it."""
        snapshot = self._snapshots.take(self.name)
        self._no_room = snapshot is None
        if snapshot is None:
            self.waits_for = "servers that still get an older version"
            return
        began, whole = time.monotonic(), False
        self._labels.add(snapshot.label)
        self.waits_for = f"version {snapshot.version}, which is on its way"
        try:
            if self.server.state is _S.JOINING:
                await self.at_queue.tell(_S.SYNCING)
            outcome = await self.under_way.run(partial(self._sync.publish, snapshot))
            whole = True
            took_s = time.monotonic() - began
            await self._holds(snapshot, ServerFigures.of(outcome, took_s, self.at_queue.transport))
        except (*PUBLISH_ERRORS, TimeoutError) as error:
            await self._failed(snapshot, state, error)
        except QueueRefused as refusal:
            # It registered again or was taken out in between: the registry, which is read soon, tells.
            self._is_new_process()
            self._note_failure(snapshot, f"{self.name}: {refusal}")
        except asyncio.CancelledError:
            if self._sync.left_paused:
                await shielded(self.at_queue.leave_quarantined(snapshot.version))
            task = asyncio.current_task()
            if not self.under_way.given_up or (task is not None and task.cancelling()):
                raise
            self._note_failure(snapshot, f"{self.server.url}: given up for a newer version")
        finally:
            self._snapshots.give_back(self.name, snapshot, whole)

    async def _heard_beside(self, why: str | None, asked: float) -> None:
        """Beside a publication: why the engine that was `asked` then gives no answer, None where it does."""
        if why is None:
            self._silent_since = None
        else:
            await self._does_not_answer(why, asked)

    async def _holds(self, snapshot: Snapshot, figures: ServerFigures) -> None:
        # One that was long on its way would hold admission until it has the newest, which is next.
        told = self.server.state in (_S.SERVING, _S.DRAINING)
        if told or not self._others.would_be_stale(self, snapshot.version, figures.took_s):
            if not told and self.server.state is not _S.SYNCING:
                await self.at_queue.tell(_S.SYNCING)
            await self.at_queue.tell(_S.SERVING, snapshot.version)
        self.version, self.failures, self.waits_for, self._took_s = snapshot.version, 0, None, figures.took_s
        self.behind_since, self._labels = None, {snapshot.label}
        self._others.proven(self, snapshot.version, figures)

    async def _failed(self, snapshot: Snapshot, before: EngineState, error: Exception) -> None:
        reason = str(error) or f"{self.server.url}: not done within weight_sync.timeout_s = {self._timeout_s:g} s"
        mismatch, now = isinstance(error, ProofFailed), None
        must_leave = mismatch or self._sync.left_paused
        if not must_leave:
            with suppress(ControlError, TimeoutError):  # the next look says that it does not answer
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    now = await self._sync.control.state()
        await self.at_queue.publication_failed(snapshot, reason, must_leave, now)
        self._note_failure(snapshot, reason, at_once=mismatch and self.failures == 0)

    def _note_failure(self, snapshot: Snapshot, reason: str, at_once: bool = False) -> None:
        self.failures += 1
        pause_s = 0.0 if at_once else retry_pause_s(self.failures)
        self._next_try = time.monotonic() + pause_s
        self.waits_for = f"another try of version {snapshot.version} or newer, in {pause_s:.0f} s: {reason}"
        self._publications.failed(self.name, snapshot.version, reason)

    def _is_new_process(self) -> None:
        self.version, self._boot, self.failures, self._next_try = None, None, 0, 0.0
        self.behind_since, self._labels = None, set()

    async def _pause(self) -> None:
        """Until there is something to do, or to look."""
        left = self._next_try - time.monotonic()
        pause_s = min(LOOK_EVERY_S, left) if left > 0 else 0.0 if self._can_try() else LOOK_EVERY_S
        with suppress(TimeoutError):
            async with asyncio.timeout(max(pause_s, 0.001)):
                await self._wake.wait()

    def _can_try(self) -> bool:
        barred = self._barred.reason is not None or self.persons_pause.stands or self._no_room
        return self.answers and not barred and not self.up_to_date and self._snapshots.newest is not None
