"""Publishes one version to one server: by its transport, then the proof.

New weights count only when the proof holds. After an error, a server whose transport stages goes on generating (I6);
one that loads in place stays paused until a publication succeeds. A running publication is bounded in time, watched,
and given up for a newer version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slipstream.protocol.engine import NO_ANSWER, EngineState
from slipstream.weight_sync.fleet.adapter_publication import publish_adapter
from slipstream.weight_sync.fleet.decisions import SILENT_STEPS, patience_s
from slipstream.weight_sync.server.answers import serves_another_run
from slipstream.weight_sync.server.cancellation import gather_two
from slipstream.weight_sync.server.control import LOOK_TIMEOUT_S, ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.server.proof import ProofFailed, ProofMetrics, ServerProof, Swapped
from slipstream.weight_sync.transports.base import Sent, TransferError, Transport, checked
from slipstream.weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

PUBLISH_ERRORS = (ControlError, TransferError, ProofFailed)

# Seconds between looks at a server's state, which show a restart, and an engine that hangs in a publication.
LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """Costs of one publication to one server, and the findings of its proof.

    Attributes:
        transfer_s: Seconds beside generation.
        pause_s: Seconds in which generation stood still; those of an in-place transport include its transfer.
    """

    transfer_s: float
    pause_s: float
    proof: ProofMetrics
    sent: Sent | None = None

    @property
    def probe_max_abs_diff(self) -> float:
        """Largest difference of a log-prob of the probe, in nats."""
        return self.proof.max_abs_diff


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
            await self.disconnect()
            raise

    async def prove(self, swapped: Swapped) -> Outcome:
        """Ask for the proof of a version that the server holds and that could not be asked before.

        Raises:
            ControlError: A call to the server failed.
            ProofFailed: The server computes with other weights.
        """
        return Outcome(0.0, 0.0, await self.proof.prove(self.control, swapped))

    async def generates(self, step_s: float = 0.0) -> bool:
        """Return whether the server generates a token, on the path that episodes take.

        Args:
            step_s: Seconds of its engine's longest step lately.
        """
        adapter = self._proven if self._transport is None else None  # else it is a label
        # A task of its own: in Python 3.11 an error in a task group leaves its task with a request to be cancelled.
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
        transport = await self._connect()
        # The cache tells versions apart, so only the first publication clears it: an earlier learner may have used the
        # same numbers.
        looked = asyncio.Event()
        pause = Pause(self.control, self._proven is None, transport.stages, looked, self.left_paused)
        began = time.monotonic()
        try:
            # Asking for the server's log-probs before the swap costs no time beside the transfer.
            await gather_two(self._look(snapshot, looked), transport.publish(self.control, snapshot, pause))
        finally:
            self.left_paused = pause.left_paused
        transfer_s = time.monotonic() - began - pause.seconds
        metrics = await self.proof.prove(self.control, snapshot)
        self._proven = snapshot.label
        return Outcome(transfer_s, pause.seconds, metrics, transport.sent)

    async def _look(self, snapshot: Snapshot, looked: asyncio.Event) -> None:
        if not self.left_paused:
            await self.proof.look(self.control, snapshot, known=self._proven is not None)
        looked.set()

    async def _connect(self) -> Transport:
        """Return the transport: a new one if there is none, or the server is not as the last publication left it."""
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
        """Return the server's status.

        Raises:
            ControlError: Its engine does not answer, or it serves another run.
        """
        state = await self.control.state()
        if not state.alive:
            raise ControlError(f"{self.control.url}: {state.reason or 'the engine does not answer'}")
        if state.owner and state.owner != self.control.run_id:
            raise ControlError(serves_another_run(self.control.url, state.owner, state.owner_silent_s))
        return state


class PublicationAttempt:
    """Runs one publication at a time, bounded by a time-out, and watches the engine meanwhile.

    Attributes:
        given_up: Whether the last publication was ended by `give_up`.
    """

    def __init__(
        self,
        control: ServerControl,
        on_answer: Callable[[str | None, float], Awaitable[None]],
        on_unanswered: Callable[[float], object],
        on_state: Callable[[EngineState], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        """Prepare to run publications.

        Args:
            on_answer: Called after each look with why the engine gave no answer, None where it did, and when it was
                asked (`time.monotonic`).
            on_unanswered: Called with when it was asked, where a publication failed before that look had an answer.
            on_state: Called with each of its answers.
            timeout_s: Bound on one publication, in seconds.
        """
        self.given_up = False
        self._control = control
        self._on_answer = on_answer
        self._on_unanswered = on_unanswered
        self._on_state = on_state
        self._timeout_s = timeout_s
        self._publishing: asyncio.Task[Outcome] | None = None

    def give_up(self) -> None:
        """End the running publication, so that its snapshot can be filled anew."""
        if self._publishing is not None:
            self.given_up = True
            self._publishing.cancel()

    async def run(self, publication: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Await `publication()` and return its outcome.

        Raises:
            TimeoutError: It took too long. Errors of the publication propagate.
        """

        async def publish() -> Outcome:
            async with asyncio.timeout(self._timeout_s):
                return await publication()

        self.given_up = False
        self._publishing = asyncio.ensure_future(publish())
        try:
            await self._watch_engine(self._publishing)
            return await self._publishing
        except asyncio.CancelledError:
            if not self._publishing.done():
                self._publishing.cancel()
                await asyncio.wait([self._publishing])
            raise
        finally:
            self._publishing = None

    async def _watch_engine(self, publishing: asyncio.Task[Outcome]) -> None:
        """Look at the engine until the publication ends: one that hangs must be marked down long before the
        publication's own time-out, as the requests that it holds keep everybody waiting."""
        while not publishing.done():
            await asyncio.wait([publishing], timeout=LOOK_EVERY_S)
            if publishing.done():
                return
            asked = time.monotonic()
            look = asyncio.ensure_future(self._why_silent())
            try:
                await asyncio.wait([publishing, look], return_when=asyncio.FIRST_COMPLETED)
            finally:
                look.cancel()
            if publishing.done():
                if not look.done() and (publishing.cancelled() or publishing.exception() is not None):
                    self._on_unanswered(asked)
                return
            await self._on_answer(look.result(), asked)

    async def _why_silent(self) -> str | None:
        """Return why the engine gives no answer; None where it does, or where a load in place keeps it busy."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                state = await self._control.state()
        except (ControlError, TimeoutError) as error:
            return await self._control.explain(error)
        if state.alive or state.pause_owner == "publication":
            await self._on_state(state)
            return None
        return f"{self._control.url}: {state.reason or NO_ANSWER}"
