"""One version onto one server: transport, proof by probe, and what each outcome leaves behind.

New weights count only when the proof holds. After an error a server with a transport that stages goes on generating
(I6); with one that loads in place it stays paused, and a publication that succeeds resumes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from weight_sync.fleet.adapter_publication import publish_adapter
from weight_sync.server.answers import EngineState, serves_another_run
from weight_sync.server.cancellation import gather_two
from weight_sync.server.control import ControlError, ServerControl
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
