"""Runs the task of one server: makes the calls that `member_state` decides on, and turns their answers into events.

Neither the learner nor another server waits for it. A publication is bounded in time, watched, and given up for a
newer version. Each change of state is one line of the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from slipstream.protocol.client import QueueError, QueueRefused
from slipstream.protocol.config import RunConfig
from slipstream.protocol.engine import MAY_ANSWER, NO_ANSWER
from slipstream.protocol.messages import Server, ServerState
from slipstream.weight_sync.fleet import member_state as table
from slipstream.weight_sync.fleet.decisions import Standing, patience_s
from slipstream.weight_sync.fleet.eligibility import Eligibility, Wanted
from slipstream.weight_sync.fleet.member_state import LOOK_EVERY_S, Event, MemberState, Tell, Weights
from slipstream.weight_sync.fleet.publications import Publications, ServerMetrics
from slipstream.weight_sync.fleet.server_publication import Outcome, ServerSync
from slipstream.weight_sync.fleet.snapshots import Snapshots
from slipstream.weight_sync.server.control import LOOK_TIMEOUT_S
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.proof import ProofFailed, Swapped
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

# Seconds in which a learner that ends takes a server out of service that it leaves paused.
QUARANTINE_TIMEOUT_S = 5.0


class FleetView(Protocol):
    """The part of the fleet that a member uses."""

    def claim(self, boot: str, name: str) -> str | None:
        """Claim `name` for the server process `boot`. Returns why not, where it is in the fleet under another name."""

    def proven(self, name: str, version: int, metrics: ServerMetrics) -> None:
        """Note that a server computes with `version`, and the costs of the publication."""

    def would_be_stale(self, name: str, version: int, took_s: float) -> bool:
        """Return whether a server would be too far behind with `version`, whose publication took `took_s` seconds."""


class Member:
    """One server of the fleet.

    Attributes:
        state: What is known of it, and the call that runs.
        updates: Grows before and after each call to the queue, so it is odd during one. A registry that was read across
            a call is older than `state.server`.
    """

    def __init__(
        self,
        server: Server,
        sync: ServerSync,
        put: Callable[[Server], Awaitable[Server]],
        snapshots: Snapshots,
        publications: Publications,
        fleet: FleetView,
        config: RunConfig,
        wanted: Wanted,
    ) -> None:
        self.state = MemberState(server, config.vllm.max_num_seqs)
        self.updates = 0
        self.name = server.name
        self._sync = sync
        self._put = put
        self._snapshots = snapshots
        self._publications = publications
        self._fleet = fleet
        self._timeout_s = config.weight_sync.timeout_s
        self._eligibility = Eligibility(sync.control, wanted)
        self._wake = asyncio.Event()
        self._left_service_at: float | None = None
        # What proves the weights that were last sent, and may be swapped in without a verdict.
        self._sent: Swapped | None = None
        self._running: asyncio.Task[Outcome] | None = None
        self._given_up = False
        self._unanswered_at: float | None = None

    @property
    def standing(self) -> Standing:
        return Standing(self.name, self.state.server.state, self.state.server.version, self.state.took_s)

    def wake(self, at_once: bool = False) -> None:
        """End the task's pause: there is a new version, or room for it. `at_once`: whatever failed before."""
        self.state, _ = table.decide(self.state, table.Wanted(time.monotonic(), self._target(), at_once))
        self._wake.set()

    def take_registration(self, server: Server) -> None:
        """Take over what another process may have changed in the queue's registry."""
        ours = self.state.server
        if (ours.state, ours.version, ours.changed_at) == (server.state, server.version, server.changed_at):
            return
        self.state, _ = table.decide(self.state, table.Registered(time.monotonic(), server))
        self.wake()

    def give_up(self) -> None:
        """End the running publication, so that its snapshot can be filled again."""
        if self._running is not None:
            self._given_up = True
            self._running.cancel()

    async def run(self) -> None:
        """Keep the server up to date. Runs until cancelled.

        Raises:
            QueueError: The queue failed. Unexpected exceptions propagate too.
        """
        event: Event = table.Due(time.monotonic())
        while True:
            try:
                await self.handle(event)
                event = await self._make_call()
            except QueueRefused as refusal:
                event = table.Refused(time.monotonic(), str(refusal))
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # a call that failed in the same moment replaced it by its own error

    async def leave(self) -> None:
        """Close the connection and give the server up to other runs. One that is left paused is quarantined, if the
        queue answers in time (I6)."""
        try:
            async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                await self.handle(table.Left(time.monotonic(), self._sync.left_paused))
        except (QueueError, TimeoutError) as error:
            logger.error("%s is left paused and could not be quarantined: %s", self.name, error or "no answer")
        await self._sync.disconnect()
        await self._sync.control.goodbye()

    async def handle(self, event: Event) -> None:
        """Decide about an event, and do what is decided, except for the call.

        Raises:
            QueueRefused: The queue refused a state without which it makes no sense to continue.
            QueueError: The queue failed.
        """
        if (target := self._target()) != self.state.target:
            self.state, _ = table.decide(self.state, table.Wanted(event.now, target))
        self.state, actions = table.decide(self.state, event)
        for action in actions:
            match action:
                case Tell():
                    await self._tell(action)
                case table.Warn(text):
                    logger.warning("%s at %s %s", self.name, self.state.server.url, text)
                case table.NoteProven(version, metrics):
                    self._fleet.proven(self.name, version, metrics)
                case table.NoteFailed(version, reason):
                    self._publications.failed(self.name, version, reason)

    def _target(self) -> Weights | None:
        newest = self._snapshots.newest
        return None if newest is None else _weights_of(newest)

    async def _tell(self, tell: Tell) -> None:
        known, state = self.state.server, self.state
        if known.state is not tell.state and tell.state is not ServerState.SERVING:
            level = logging.INFO if tell.state in (ServerState.SYNCING, ServerState.JOINING) else logging.WARNING
            why = f": {tell.reason}" if tell.reason else ""
            logger.log(level, "%s at %s is %s%s", known.name, known.url, tell.state, why)
        wanted = Server(
            *(known.name, known.url, tell.state, tell.version, tell.reason),
            transport=state.transport,
            proof=tell.proof,
            slow=state.slow,
        )
        self.updates += 1
        try:
            server = await self._put(wanted)
        except QueueRefused:  # the registry has changed, and is read again soon
            if tell.must:
                raise
            return
        finally:
            self.updates += 1
        self.state, _ = table.decide(self.state, table.Told(time.monotonic(), tell.state, server))
        if known.state is ServerState.SERVING and tell.state not in (ServerState.SERVING, ServerState.DRAINING):
            self._left_service_at = time.monotonic()
        if tell.state is ServerState.SERVING and self._left_service_at is not None:
            out_s, self._left_service_at = time.monotonic() - self._left_service_at, None
            again = "%s at %s serves again, after %.0f s, with version %s"
            logger.info(again, known.name, known.url, out_s, tell.version)

    async def _make_call(self) -> Event:
        match self.state.call:
            case "look":
                return await self._look()
            case "generate":
                token = await self._sync.generates(self.state.process.step_s)
                return table.Generated(time.monotonic(), token)
            case "publish":
                return await self._publish()
            case "prove":
                assert self.state.process.attempt is not None
                assert self._sent is not None
                return await self._attempt(self.state.process.attempt, self._sync.prove(self._sent))
            case "wait" | "left":
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(self.state.pause_s(time.monotonic()), 0.001)):
                        await self._wake.wait()
                self._wake.clear()
                return table.Due(time.monotonic())

    async def _look(self, watching: bool = False) -> Event:
        """Ask the engine for its state. `watching`: during a publication, where a load in place keeps it busy."""
        began, control = time.monotonic(), self._sync.control
        within_s = LOOK_TIMEOUT_S if watching else patience_s(LOOK_TIMEOUT_S, self.state.process.step_s)
        try:
            async with asyncio.timeout(within_s):
                engine = await control.state()
        except (ControlError, TimeoutError) as error:
            # A look counts for its time-out at most: for the rest of the time this process was stopped.
            asked = max(began, time.monotonic() - within_s)
            why, unconnected = await control.explain(error, within_s), getattr(error, "unconnected", None)
            return table.Silent(time.monotonic(), asked, why, unconnected=unconnected)
        if not engine.alive and not (watching and engine.pause_owner == "publication"):
            # Only the API process answers, which knows neither weights nor boot. The engine may be in a long step.
            why = f"{control.url}: {engine.reason or NO_ANSWER}"
            hopeless = not watching and engine.reason not in (None, *MAY_ANSWER)
            return table.Silent(time.monotonic(), began, why, hopeless, step_s=engine.step_s)
        claimed = None if watching else self._fleet.claim(engine.boot, self.name)
        ineligible = None if watching else await self._eligibility.look(engine, claimed)
        return table.Answered(time.monotonic(), engine, control.run_id, ineligible)

    async def _publish(self) -> Event:
        snapshot = self._snapshots.take(self.name)
        if snapshot is None:
            return table.NoRoom(time.monotonic())
        weights, event, self._sent = _weights_of(snapshot), None, Swapped.of(snapshot)
        try:
            await self.handle(table.Opened(time.monotonic(), weights))
            event = await self._attempt(weights, self._sync.publish(snapshot))
            return event
        finally:
            self._snapshots.give_back(self.name, snapshot, isinstance(event, table.Proven))

    async def _attempt(self, weights: Weights, work: Awaitable[Outcome]) -> Event:
        """Await a publication or a proof, and return how it ended."""
        began, url = time.monotonic(), self._sync.control.url
        try:
            outcome = await self._watched(work)
        except ProofFailed as error:
            return table.Disproven(time.monotonic(), weights, str(error))
        except (ControlError, TransferError, TimeoutError) as error:
            why = str(error) or f"{url}: not done within weight_sync.timeout_s = {self._timeout_s:g} s"
            asked, engine = time.monotonic(), None
            if self.state.call == "prove" or self._sync.left_paused:
                return table.CallFailed(asked, weights, why, self._sync.left_paused, asked=self._unanswered_at)
            with suppress(ControlError, TimeoutError):
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    engine = await self._sync.control.state()
            asked_at = self._unanswered_at or (asked if engine is None else None)
            return table.CallFailed(time.monotonic(), weights, why, engine=engine, asked=asked_at)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._given_up or (task is not None and task.cancelling()):
                raise
            why = f"{url}: given up for a newer version"
            return table.CallFailed(time.monotonic(), weights, why, self._sync.left_paused)
        took_s = time.monotonic() - began
        late = self._fleet.would_be_stale(self.name, weights.version, took_s)
        metrics = ServerMetrics.of(outcome, took_s, self.state.transport)
        return table.Proven(time.monotonic(), weights, metrics, late)

    async def _watched(self, work: Awaitable[Outcome]) -> Outcome:
        """Await `work` for `timeout_s` at most, and look at the engine meanwhile: one that hangs must be marked down
        long before that, as the requests that it holds keep everybody waiting."""

        async def bounded() -> Outcome:
            async with asyncio.timeout(self._timeout_s):
                return await work

        self._given_up, self._unanswered_at = False, None
        self._running = running = asyncio.ensure_future(bounded())
        try:
            while True:
                await asyncio.wait([running], timeout=LOOK_EVERY_S)
                if running.done():
                    return await running
                asked = time.monotonic()
                look = asyncio.ensure_future(self._look(watching=True))
                try:
                    await asyncio.wait([running, look], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    look.cancel()
                if not running.done():
                    await self.handle(look.result())
                elif not look.done():
                    self._unanswered_at = asked
        finally:
            self._running = None
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


def _weights_of(snapshot: Snapshot) -> Weights:
    return Weights(snapshot.version, snapshot.label, snapshot.adapter_config is not None)
