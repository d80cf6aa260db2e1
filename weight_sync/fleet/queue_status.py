"""Keeps the queue's record of one server up to date. Each change of state is one line of the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from slipstream.protocol.client import QueueError, QueueRefused
from slipstream.protocol.engine import EngineState
from slipstream.protocol.messages import PAUSED_BY_PERSON, Proof, Server, ServerState
from slipstream.weight_sync.transports.registry import of_backend
from slipstream.weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

# Seconds for which a cancelled publication tries to take its server out of service.
QUARANTINE_TIMEOUT_S = 5.0

# Shown in place of a transport's name for adapters.
ADAPTER = "adapter"
_S = ServerState

Put = Callable[[Server], Awaitable[Server]]


def transport_to(state: EngineState, newest: Snapshot | None) -> str:
    """Return the name of the transport that brings `newest` to a server. An adapter takes its own routes instead."""
    if newest is not None and newest.adapter_config is not None:
        return ADAPTER
    return of_backend(state.transport) or state.transport


class QueueReporter:
    """Tells the queue the state of one server.

    Attributes:
        server: The server as the queue knows it.
        updates: Grows before and after each call, so it is odd during one. A registry that was read across a call is
            older than `server`.
        transport: How weights travel to the server, None while it has not said so.
        slow: Why it is slow, with the remedy; None while it is not.
        left_at: When it left service (`time.monotonic`), None while it serves and before it first did.
    """

    def __init__(self, server: Server, put: Put) -> None:
        self.server = server
        self.updates = 0
        self.transport: str | None = None
        self.slow: str | None = None
        self.left_at: float | None = None
        self._settled_at: float | None = None
        self._put = put

    async def tell(
        self, state: ServerState, version: int | None = None, reason: str | None = None, proof: Proof | None = None
    ) -> None:
        """Tell the queue a state that it does not know yet.

        Args:
            version: The version that the state is about, None to leave it.
            reason: Why, for people.
            proof: Of a version that serves from now on, None to leave it.

        Raises:
            QueueRefused: The state does not follow from the one that the queue has.
            QueueError: The queue failed.
        """
        known = self.server
        if (known.state, known.reason) == (state, reason) and version in (None, known.version):
            return
        if known.state is not state and state is not _S.SERVING:
            level = logging.INFO if state in (_S.SYNCING, _S.JOINING) else logging.WARNING
            logger.log(level, "%s at %s is %s%s", known.name, known.url, state, f": {reason}" if reason else "")
        self.updates += 1
        try:
            self.server = await self._put(
                Server(
                    *(known.name, known.url, state, version, reason),
                    transport=self.transport,
                    proof=proof,
                    slow=self.slow,
                )
            )
        finally:
            self.updates += 1
        if known.state is _S.SERVING and state not in (_S.SERVING, _S.DRAINING):
            self.left_at = time.monotonic()
        if state is _S.SERVING and self.left_at is not None:
            out_s, self.left_at = time.monotonic() - self.left_at, None
            logger.info("%s at %s serves again, after %.0f s, with version %s", known.name, known.url, out_s, version)

    async def tell_slow(self, slow: str | None) -> None:
        """Tell the queue that the server has become slow, or no longer is. A server of which another state is told is
        not told apart."""
        if (slow is None) == (self.slow is None):
            return
        self.slow = slow
        if slow is not None:
            logger.warning("%s at %s is slow: %s", self.server.name, self.server.url, slow)
        if self.server.state is _S.SERVING:
            self.updates += 1
            try:
                with suppress(QueueRefused):
                    self.server = await self._put(
                        Server(self.server.name, self.server.url, _S.SERVING, self.server.version, slow=slow)
                    )
            finally:
                self.updates += 1

    async def try_to_tell(self, state: ServerState, version: int | None = None, reason: str | None = None) -> None:
        """Call `tell` and ignore a refusal: the registry has changed, and is read again soon."""
        with suppress(QueueRefused):
            await self.tell(state, version, reason)

    async def settled(self) -> None:
        """Tell the queue, once for each drain, that the draining server may leave: no version is on its way to it."""
        began = self.server.changed_at
        if self._settled_at != began:
            with suppress(QueueRefused):
                await self._put(Server(self.server.name, self.server.url, _S.DRAINING))
            self._settled_at = began

    async def quarantine(self, version: int, reason: str) -> None:
        """Take the server out of service. One in quarantine keeps the first failed version: distrust begins there.

        Args:
            version: The version that failed.
        """
        if self.server.state is _S.QUARANTINED:
            return
        if self.server.state not in (_S.SYNCING, _S.SERVING, _S.DRAINING):
            await self.try_to_tell(_S.SYNCING)
        await self.try_to_tell(_S.QUARANTINED, version, reason)

    async def publication_failed(
        self, snapshot: Snapshot, reason: str, must_leave: bool, now: EngineState | None
    ) -> None:
        """Tell the queue the state that a failed publication leaves the server in.

        Args:
            must_leave: Whether its proof failed, or it is left paused.
            now: The server's own status after the failure, None if it does not answer.
        """
        swapped = now is not None and now.label == snapshot.label and snapshot.adapter_config is None
        if must_leave:
            await self.quarantine(snapshot.version, reason)
        elif swapped:
            await self.proof_unasked(snapshot.version, reason)
        elif now is not None and not now.whole:
            await self.quarantine(snapshot.version, reason)
        elif self.server.state is _S.SERVING:
            # It goes on with its proven version; the fleet marks it stale if that falls too far behind.
            logger.warning("%s keeps version %s: %s", self.server.name, self.server.version, reason)
        elif self.server.state not in (_S.QUARANTINED, _S.DRAINING):
            if self.server.state is _S.DOWN:
                await self.try_to_tell(_S.SYNCING)
            await self.try_to_tell(_S.STALE, None, reason)

    async def proof_unasked(self, version: int, reason: str) -> None:
        """Take a server out of service whose proof could not be asked. That is no verdict: what it sampled waits for
        the proof (I5). One in quarantine stays there."""
        if self.server.state is not _S.QUARANTINED:
            why = f"version {version} is swapped in, and its proof could not be asked; it is asked again: {reason}"
            await self.try_to_tell(_S.SYNCING, None, why)

    async def leave_quarantined(self, version: int) -> None:
        """Quarantine a server that is left paused (I6), if the queue answers in time."""
        server = self.server
        reason = f"{server.url}: left paused: the learner ended before it had loaded version {version}"
        try:
            async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                await self.quarantine(version, reason)
        except (QueueError, TimeoutError) as error:
            logger.error("%s is left paused and could not be quarantined: %s", server.name, error or "no answer")


class Standstill:
    """A server whose engine answers and that generates nothing: a person paused it, or it cannot.

    It leaves service even if it is up to date, so that waiting work moves to others, and nothing is published to it.
    After that it serves again without a publication, as it still holds what was proven on it.

    Attributes:
        cause: Why nothing was generated at the last look, for people; None where it may be.
        by_person: Whether a person paused it.
        must_step: Whether it has to generate a token before it serves again: it could not, and nobody has ended that.
    """

    def __init__(self, reporter: QueueReporter) -> None:
        self.cause: str | None = None
        self.by_person = False
        self.must_step = False
        self._reporter = reporter
        self._told: str | None = None

    def look(self, state: EngineState) -> str | None:
        """Take over a server's answer. Returns the cause."""
        self.by_person = state.paused and state.pause_owner == "person"
        self.cause = f"{PAUSED_BY_PERSON}: waits for POST /resume" if self.by_person else state.stuck
        self.must_step = self.must_step or (self.cause is not None and not self.by_person)
        return self.cause

    async def tell(self) -> None:
        """Tell the queue of the cause: no publication could be proven."""
        if self._reporter.server.state in (_S.JOINING, _S.DOWN):
            await self._reporter.try_to_tell(_S.SYNCING)
        if self._reporter.server.state in (_S.SYNCING, _S.SERVING, _S.STALE):
            self._told = self.cause
            await self._reporter.try_to_tell(_S.STALE, None, self.cause)

    def is_only_obstacle(self, state: EngineState, label: str) -> bool:
        """Return whether a standstill alone keeps the server out of service, and it holds the weights of `label`."""
        server = self._reporter.server
        stood = server.state is _S.STALE and self._told is not None and server.reason == self._told
        return stood and state.label == label and state.whole

    async def end(self, version: int) -> None:
        """Put the server back into service with `version`, proven before, as nothing changed its weights (I5)."""
        with suppress(QueueRefused):
            await self._reporter.tell(_S.SYNCING)
            await self._reporter.tell(_S.SERVING, version)

    def forget(self) -> None:
        """Begin anew with another process of the server."""
        self.cause, self.by_person, self.must_step, self._told = None, False, False, None
