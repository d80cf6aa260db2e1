"""One version onto one server: transport, proof by probe, and what each outcome leaves behind.

New weights count only when the proof holds. After an error a server with a transport that stages goes on generating
(I6); with one that loads in place it stays paused, and a publication that succeeds resumes it.

One server's publication while it is under way: bounded in time, watched, and given up for a newer version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weight_sync.fleet.adapter_publication import publish_adapter
from weight_sync.server.answers import EngineState, serves_another_run
from weight_sync.server.cancellation import gather_two
from weight_sync.server.control import LOOK_TIMEOUT_S, NO_ANSWER, ControlError, ServerControl
from weight_sync.server.pause import Pause
from weight_sync.server.proof import ProofFailed, ProofFigures, ServerProof
from weight_sync.transports.base import Sent, TransferError, Transport
from weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """One publication to one server. Seconds: `transfer_s` beside generation, `pause_s` without it (an in-place
    transport's transfer included); `proof`: what the proof found; `sent`: in bytes."""

    transfer_s: float
    pause_s: float
    proof: ProofFigures
    sent: Sent | None = None

    @property
    def probe_max_abs_diff(self) -> float:
        """The probe's largest difference in log-prob, in nats."""
        return self.proof.max_abs_diff


class ServerSync:
    """Keeps the connection to one server, and knows which version it last proved there.

    `left_paused`: the server may stand still, with a half-loaded model, and must not serve until a publication
    succeeds.
    """

    def __init__(
        self,
        control: ServerControl,
        make_transport: Callable[[], Transport],
        tolerance: float,
        dtype: str = "float32",
        rounds_more: bool = False,
    ) -> None:
        """`tolerance`: the largest `probe_max_abs_diff` that proves a version, in nats; `dtype`: what the server
        computes in; `rounds_more`: whether it is quantised."""
        self.control = control
        self.proof = ServerProof(tolerance, dtype, rounds_more)
        self.left_paused = False
        self._make_transport = make_transport
        self._transport: Transport | None = None
        self._proven: str | None = None
        self._boot: str | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None

    async def publish(self, snapshot: Snapshot) -> Outcome:
        """Raises one of `PUBLISH_ERRORS`; the next call then starts from a new connection."""
        try:
            return await self._publish(snapshot)
        except BaseException:
            await self.disconnect()
            raise

    async def disconnect(self) -> None:
        transport, self._transport, self._proven = self._transport, None, None
        if transport is not None:
            await transport.close()

    async def _publish(self, snapshot: Snapshot) -> Outcome:
        if snapshot.adapter_config is not None:
            served = await publish_adapter(self.control, snapshot, self.proof, self._proven)
            self._proven = served.name
            return Outcome(served.transfer_s, 0.0, served.proof, Sent.of(snapshot))
        transport = await self._connect()
        # Prefixes are kept apart by version; only another learner may have used the same numbers before.
        looked = asyncio.Event()
        pause = Pause(self.control, self._proven is None, transport.stages, looked, self.left_paused)
        began = time.monotonic()
        try:
            # The look at what serves before the swap costs no time beside the transfer.
            await gather_two(self._look(snapshot, looked), transport.publish(self.control, snapshot, pause))
        finally:
            self.left_paused = pause.left_paused
        transfer_s = time.monotonic() - began - pause.seconds
        figures = await self.proof.prove(self.control, snapshot)
        self._proven = snapshot.label
        return Outcome(transfer_s, pause.seconds, figures, transport.sent)

    async def _look(self, snapshot: Snapshot, looked: asyncio.Event) -> None:
        if not self.left_paused:
            await self.proof.look(self.control, snapshot, known=self._proven is not None)
        looked.set()

    async def _connect(self) -> Transport:
        """The transport, new if there is none or if the server is not as the last publication left it."""
        state = await self._alive()
        if self._transport is not None:
            if (state.boot, state.label) == (self._boot, self._proven):
                return self._transport
            was = f"{state.boot}, weights {state.label!r}"
            logger.warning("%s is %s: not as it was left, connecting anew", self.control.url, was)
            await self.disconnect()
        self._boot = state.boot
        self._transport = transport = self._make_transport()
        if transport.stages:
            self.left_paused = False
        await transport.connect(self.control, state.workers)
        return transport

    async def _alive(self) -> EngineState:
        """What the server says of itself. Raises `ControlError` where its engine does not answer, or it serves another
        run."""
        state = await self.control.state()
        if not state.alive:
            raise ControlError(f"{self.control.url}: {state.reason or 'the engine does not answer'}")
        if state.owner and state.owner != self.control.run_id:
            raise ControlError(serves_another_run(self.control.url, state.owner, state.owner_silent_s))
        return state


PUBLISH_ERRORS = (ControlError, TransferError, ProofFailed)

# A server that is up to date is looked at so often, to notice that it restarted; others as often at first.
LOOK_EVERY_S = 2.0


class PublicationAttempt:
    """At most one publication at a time. `heard`: takes why the engine gives no answer, None where it does,
    and when it was asked;
    `given_up`: whether the last one was, by `let_go`."""

    def __init__(
        self, control: ServerControl, heard: Callable[[str | None, float], Awaitable[None]], timeout_s: float
    ) -> None:
        self.given_up = False
        self._control = control
        self._heard = heard
        self._timeout_s = timeout_s
        self._publishing: asyncio.Task[Outcome] | None = None

    def let_go(self) -> None:
        """End it, for the sake of its snapshot."""
        if self._publishing is not None:
            self.given_up = True
            self._publishing.cancel()

    async def run(self, publication: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Raises what the publication raises, and `TimeoutError`."""

        async def publish() -> Outcome:
            async with asyncio.timeout(self._timeout_s):
                return await publication()

        self.given_up = False
        self._publishing = asyncio.ensure_future(publish())
        try:
            await self._look_beside(self._publishing)
            return await self._publishing
        except asyncio.CancelledError:
            if not self._publishing.done():
                self._publishing.cancel()
                await asyncio.wait([self._publishing])
            raise
        finally:
            self._publishing = None

    async def _look_beside(self, publishing: asyncio.Task[Outcome]) -> None:
        """Until the publication ends: an engine that hangs in it is down soon, though the publication may wait for long
        yet, as what it is sampling holds up everybody."""
        while not publishing.done():
            await asyncio.wait([publishing], timeout=LOOK_EVERY_S)
            if publishing.done():
                return
            asked = time.monotonic()
            look = asyncio.ensure_future(self._silence())
            try:
                await asyncio.wait([publishing, look], return_when=asyncio.FIRST_COMPLETED)
            finally:
                look.cancel()
            if publishing.done() or not look.done():
                return
            await self._heard(look.result(), asked)

    async def _silence(self) -> str | None:
        """Why the engine gives no answer; None where it does, or where the load in place that is under way holds it."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                state = await self._control.state()
        except (ControlError, TimeoutError) as error:
            return str(error) or f"{self._control.url}: no answer within {LOOK_TIMEOUT_S:g} s"
        if state.alive or state.pause_owner == "publication":
            return None
        return f"{self._control.url}: {state.reason or NO_ANSWER}"
