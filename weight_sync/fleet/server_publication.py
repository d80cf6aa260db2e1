"""Publishes one version to one server: by its transport, then the proof.

New weights count only when the proof holds. After an error, a server whose transport stages continues generating (I6);
one that loads in place stays paused until a publication succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.protocol.engine import NO_ANSWER, EngineState
from slipstream.weight_sync.fleet.adapter_publication import publish_adapter
from slipstream.weight_sync.fleet.decisions import SILENT_STEPS, patience_s
from slipstream.weight_sync.fleet.generation_cost import GenerationCost, TokenCount
from slipstream.weight_sync.server.answers import serves_another_run
from slipstream.weight_sync.server.cancellation import gather_two
from slipstream.weight_sync.server.control import LOOK_TIMEOUT_S, ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.server.proof import ProofMetrics, ServerProof, Swapped
from slipstream.weight_sync.transports.base import Sent, Transport, checked
from slipstream.weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Costs of one publication to one server, and the findings of its proof.

    Attributes:
        transfer_s: Seconds during generation.
        pause_s: Seconds in which generation stood still; those of an in-place transport include its transfer.
        generation_share: As `GenerationCost.share`.
    """

    transfer_s: float
    pause_s: float
    proof: ProofMetrics
    sent: Sent | None = None
    generation_share: float | None = None


class ServerSync:
    """Keeps the connection to one server and publishes over it.

    Attributes:
        left_paused: Whether the server may stand still with a half-loaded model. It must not serve then until a
            publication succeeds.
    """

    def __init__(
        self,
        control: ServerControl,
        make_transport: Callable[[], Transport],
        tolerance: float,
        dtype: str = "float32",
        rounds_more: bool = False,
    ) -> None:
        """Prepare to publish to one server.

        Args:
            tolerance: What the differences of a proven version stay below, in nats.
            dtype: Type that the server computes in.
            rounds_more: Whether the server is quantised.
        """
        self.control = control
        self.proof = ServerProof(tolerance, dtype, rounds_more)
        self.left_paused = False
        self._make_transport = make_transport
        self._transport: Transport | None = None
        self._proven: str | None = None
        self._boot: str | None = None
        self._cost = GenerationCost()

    async def publish(self, snapshot: Snapshot) -> Outcome:
        """Bring `snapshot` to the server and prove it. After an error the next call starts with a new connection.

        Raises:
            ControlError: A call to the server failed.
            TransferError: The weights did not arrive whole.
            ProofFailed: The server computes with other weights.
        """
        try:
            return await self._publish(snapshot)
        except BaseException:
            self._cost.publication_failed()
            await self.disconnect()
            raise

    async def prove(self, swapped: Swapped) -> Outcome:
        """Ask for the proof of a version that the server holds and that was not asked. Raises as `publish`."""
        return Outcome(0.0, 0.0, await self.proof.prove(self.control, swapped))

    async def generates(self, step_s: float = 0.0) -> bool:
        """Return whether the server generates a token, on the path that episodes take.

        Args:
            step_s: Seconds of its engine's longest step lately.
        """
        adapter = self._proven if self._transport is None else None  # else it is a label
        # Its own task: in Python 3.11 an error in a task group leaves its task with a request to be cancelled.
        asking = asyncio.ensure_future(self.control.score_by_request([0, 1], adapter))
        try:
            await asyncio.wait_for(asking, patience_s(LOOK_TIMEOUT_S, step_s, SILENT_STEPS))
        except (ControlError, TimeoutError) as error:
            # A refusal of this request says nothing of others.
            return isinstance(error, ControlError) and error.status is not None and error.status < 500
        return True

    async def disconnect(self) -> None:
        """Close the transport, if there is one."""
        transport, self._transport, self._proven = self._transport, None, None
        if transport is not None:
            await transport.close()

    async def _publish(self, snapshot: Snapshot) -> Outcome:
        if snapshot.adapter_config is not None:
            served = await publish_adapter(self.control, snapshot, self.proof, self._proven)
            self._proven = served.name
            return Outcome(served.transfer_s, 0.0, served.proof, Sent.of(snapshot))
        await checked(snapshot)
        state = await self.control.state()
        counted = TokenCount(state.boot, time.monotonic(), state.generated)
        transport = await self._connect(state)
        # The cache tells versions apart, so only the first publication clears it: an earlier learner may have used the
        # same numbers.
        looked = asyncio.Event()
        pause = Pause(self.control, self._proven is None, transport.stages, looked, self.left_paused)
        began = time.monotonic()
        try:
            # Asking for the server's log-probs before the swap costs no time next to the transfer.
            await gather_two(self._look(snapshot, looked), transport.publish(self.control, snapshot, pause))
        finally:
            self.left_paused = pause.left_paused
        transfer_s = time.monotonic() - began - pause.seconds
        metrics = await self.proof.prove(self.control, snapshot)
        self._proven = snapshot.label
        try:
            state = await self.control.state()
        except ControlError:
            self._cost.publication_failed()  # its end is not known
        else:
            self._cost.published(counted, TokenCount(state.boot, time.monotonic(), state.generated))
        return Outcome(transfer_s, pause.seconds, metrics, transport.sent, self._cost.share)

    async def _look(self, snapshot: Snapshot, looked: asyncio.Event) -> None:
        if not self.left_paused:
            await self.proof.look(self.control, snapshot, known=self._proven is not None)
        looked.set()

    async def _connect(self, state: EngineState) -> Transport:
        """Return the transport: a new one if there is none, or the server is not as the last publication left it."""
        if not state.alive:
            raise ControlError(f"{self.control.url}: {state.reason or NO_ANSWER}")
        if state.owner and state.owner != self.control.run_id:
            raise ControlError(serves_another_run(self.control.url, state.owner, state.owner_silent_s))
        if self._transport is not None:
            if (state.boot, state.label) == (self._boot, self._proven):
                return self._transport
            was = f"{state.boot}, weights {state.label!r}"
            logger.warning("%s is %s: not as it was left, connecting again", self.control.url, was)
            await self.disconnect()
        self._boot = state.boot
        self._transport = transport = self._make_transport()
        if transport.stages:
            self.left_paused = False
        await transport.connect(self.control, state.workers)
        return transport
