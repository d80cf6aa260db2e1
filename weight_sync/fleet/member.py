"""Runs the task of one server: look whether it answers, bring it to the newest version, report its state to the queue.

Neither the learner nor another server waits for it. Limits of liveness follow the engine's own steps: one that takes
long for them is slow, which the queue is told, and not down. The states:

- joining: it starts, restarted (another `boot`), or holds weights that this learner did not publish.
- down: it has not answered for `DOWN_AFTER_S`, or for several of its steps where these take longer, or for
  `COMPUTING_DOWN_AFTER_S` while its processes compute; or the run may not use it.
- quarantined: its proof failed (I5), or it was left paused (I6).
- syncing, after it served: a version is swapped in whose proof could not be asked; it is asked again before anything
  else is published.

The task keeps trying in each of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import Protocol

from slipstream.protocol.client import QueueRefused
from slipstream.protocol.engine import COMPUTES, MAY_ANSWER, NO_ANSWER, EngineState
from slipstream.protocol.messages import Proof, Server, ServerState
from slipstream.weight_sync.fleet.decisions import SILENT_STEPS, Standing, is_slow, patience_s, retry_pause_s
from slipstream.weight_sync.fleet.eligibility import Eligibility, Wanted, find_lost_weights
from slipstream.weight_sync.fleet.publications import Publications, ServerMetrics
from slipstream.weight_sync.fleet.queue_status import Put, QueueReporter, Standstill, transport_to
from slipstream.weight_sync.fleet.server_publication import LOOK_EVERY_S, PUBLISH_ERRORS, PublicationAttempt, ServerSync
from slipstream.weight_sync.fleet.snapshots import Snapshots
from slipstream.weight_sync.server.cancellation import shielded
from slipstream.weight_sync.server.control import LOOK_TIMEOUT_S
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.proof import ProofFailed, Swapped
from slipstream.weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

# Seconds without an answer after which a server that served counts as down, unless its steps take longer: requests to
# it would hang. One whose engine computes may be in its first long step: its limit is higher, lest that be a hang too.
DOWN_AFTER_S = 10.0
COMPUTING_DOWN_AFTER_S = 60.0
_S = ServerState


class FleetView(Protocol):
    """The part of the fleet that a member uses."""

    def claim(self, boot: str, name: str) -> str | None:
        """Claim `name` for the server process `boot`. Returns why not, where it is in the fleet under another name."""

    def proven(self, member: Member, version: int, metrics: ServerMetrics) -> None:
        """Note that a server computes with `version`, and the costs of the publication."""

    def would_be_stale(self, member: Member, version: int, took_s: float) -> bool:
        """Return whether a server would be too far behind with `version`, whose publication took `took_s` seconds."""


class Member:
    """One server of the fleet.

    Attributes:
        version: The version that this learner proved on the server's present process, None before.
        waits_for: Obstacle that keeps it from being up to date, for people.
        start_text: How it shows that it has not started yet, for people; None once it has.
        failures: Failed publications in a row.
        answers: Whether it answered at the last look.
        behind_since: When it was first found behind the others, None while it is not (`time.monotonic`).
    """

    def __init__(
        self,
        server: Server,
        sync: ServerSync,
        put: Put,
        snapshots: Snapshots,
        publications: Publications,
        fleet: FleetView,
        timeout_s: float,
        wanted: Wanted,
        max_num_seqs: int,
    ) -> None:
        self.reporter = QueueReporter(server, put)
        self.version: int | None = None
        self.waits_for: str | None = None
        self.start_text: str | None = None
        self.failures = 0
        self.standstill = Standstill(self.reporter)
        self.answers = False
        self.behind_since: float | None = None
        self._sync = sync
        self._snapshots = snapshots
        self._publications = publications
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._eligibility = Eligibility(sync.control, wanted)
        self._boot: str | None = None
        # Labels that the server may hold as a result of our publications.
        self._labels: set[str] = set()
        # A publication that ended without a verdict, and may have been swapped in.
        self._unproven: Swapped | None = None
        self._asks = False
        self._no_room = False
        self._took_s = 0.0
        self._silent_since: float | None = None
        self._step_s = 0.0
        self._max_num_seqs = max_num_seqs
        self._next_try = 0.0
        self._wake = asyncio.Event()
        self.attempt = PublicationAttempt(
            sync.control, self._note_answer, self._note_silent_since, self._note_state, timeout_s
        )

    @property
    def server(self) -> Server:
        """The server as the queue knows it."""
        return self.reporter.server

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def standing(self) -> Standing:
        return Standing(self.name, self.server.state, self.server.version, self._took_s)

    @property
    def wait_text(self) -> str | None:
        return self.start_text or (f"waits for {self.waits_for}" if self.waits_for else None)

    @property
    def up_to_date(self) -> bool:
        newest = self._snapshots.newest
        if self.server.state is _S.DRAINING:
            return True
        return self.server.state is _S.SERVING and (newest is None or self.version == newest.version)

    def wake(self) -> None:
        """End the task's pause: there is a new version, or the registry has changed."""
        self._wake.set()
        self._note_asked()

    def take_registration(self, server: Server) -> None:
        """Take over a change that another process made in the queue's registry."""
        if server.state is _S.JOINING:
            self._forget_process()
        self.reporter.server = server
        self.wake()

    def reset_failures(self) -> None:
        """Forget earlier failures and try at once."""
        self.failures, self._next_try = 0, 0.0
        self.wake()

    async def run(self) -> None:
        """Keep the server up to date. Runs until cancelled.

        Raises:
            QueueError: The queue failed. Unexpected exceptions propagate too.
        """
        while True:
            self._wake.clear()
            self._no_room = False
            state = await (self.reporter.settled() if self.server.state is _S.DRAINING else self._look())
            if state is not None:
                await self._prove_again(state)
            newest, due = self._snapshots.newest, time.monotonic() >= self._next_try
            if state is not None and newest is not None and not await self._stands_still(state):
                if self.version == newest.version and self.standstill.is_only_obstacle(state, newest.label):
                    await self.standstill.end(newest.version)
                elif due and not self.up_to_date and self._unproven is None:
                    await self._bring(state)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # a call that failed in the same moment replaced it by its own error
            await self._pause()

    async def leave(self) -> None:
        """Close the connection and give the server up to other runs."""
        await self._sync.disconnect()
        await self._sync.control.goodbye()

    async def _look(self) -> EngineState | None:
        """Return the server's status, None where its engine does not answer or the run may not use it."""
        began, self._asks = time.monotonic(), True
        self._note_asked()
        within_s = patience_s(LOOK_TIMEOUT_S, self._step_s)
        try:
            async with asyncio.timeout(within_s):
                state = await self._sync.control.state()
        except (ControlError, TimeoutError) as error:
            # A look counts for its time-out at most: for the rest of the time this process was stopped.
            began = max(began, time.monotonic() - within_s)
            if isinstance(error, ControlError) and error.unconnected and self.server.state is _S.JOINING:
                await self._note_not_up(f"{self.server.url} does not answer yet ({error.unconnected})")
            else:
                await self._note_silence(await self._sync.control.explain(error, within_s), began)
            return None
        finally:
            self._asks = False
        self._step_s = state.step_s
        if not state.alive:
            # Only the API process answers, which knows neither weights nor boot. The engine may be in a long step.
            why = f"{self.server.url}: {state.reason or NO_ANSWER}"
            await self._note_silence(why, began, at_once=state.reason not in (None, *MAY_ANSWER))
            return None
        await self._note_step_time(state.step_s)
        self.reporter.transport = transport_to(state, self._snapshots.newest)
        self._silent_since = None
        if not self.answers:
            self.answers, self.start_text = True, None
            self._next_try = 0.0
        if await self._is_ineligible(state):
            return None
        ours = None if self.version is None else self._labels
        if (lost := find_lost_weights(state, self._boot, ours, self._sync.control.run_id)) is not None:
            logger.warning("%s at %s: %s", self.name, self.server.url, lost)
            self._forget_process()
            await self.reporter.try_to_tell(_S.JOINING, None, lost)
        self._boot = state.boot
        if self.up_to_date:
            self.waits_for = None
        return state

    async def _note_step_time(self, step_s: float) -> None:
        """Note the engine's longest step lately. Tell the queue when the server has become slow, or no longer is."""
        self._step_s = step_s
        slow = None
        if is_slow(step_s, self.reporter.slow is not None):
            slow = f"its engine takes up to {step_s:.0f} s for a step: lower vllm.max_num_seqs = {self._max_num_seqs}"
        await self.reporter.tell_slow(slow)

    def _note_asked(self) -> None:
        """Name the look that is under way as the obstacle, also where it began while the server was up to date."""
        if self._asks and self.waits_for is None and not self.up_to_date:
            self.waits_for = "an answer of its engine"

    async def _is_ineligible(self, state: EngineState) -> bool:
        """Return whether the run may not use the server, which is then down for this run. Tells the queue once."""
        reason = await self._eligibility.look(state, self._fleet.claim(state.boot, self.name))
        if reason is None:
            return False
        self.waits_for = reason
        if self.server.state is not _S.DOWN or self._eligibility.is_news:
            await self.reporter.try_to_tell(_S.DOWN, None, reason)
            self._forget_process()
        return True

    async def _note_not_up(self, why: str) -> None:
        """Note that nothing listens at the server's address yet."""
        self.answers, self.start_text, self.waits_for = False, why, "its start"
        if self.server.reason is None:
            await self.reporter.try_to_tell(_S.JOINING, None, why)

    async def _note_silence(self, why: str, asked: float, at_once: bool = False) -> None:
        """Note that the engine does not answer, and marks the server down when that has lasted.

        Args:
            why: The error, with the server's URL.
            asked: When it was asked (`time.monotonic`).
            at_once: Whether it cannot answer again before a restart.
        """
        self.answers, self.start_text = False, None
        silent_since = self._note_silent_since(asked)
        self.waits_for = f"an answer of its engine ({why})"
        state = self.server.state
        least_s = COMPUTING_DOWN_AFTER_S if why.endswith(COMPUTES) else DOWN_AFTER_S
        if state in (_S.JOINING, _S.DOWN):
            if state is _S.JOINING and self.server.reason is None:
                await self.reporter.try_to_tell(_S.JOINING, None, f"not up yet: {why}")
        elif time.monotonic() - silent_since >= patience_s(least_s, self._step_s, SILENT_STEPS) or at_once:
            look = "" if at_once else "; it makes no progress: look at its process and its log"
            await self.reporter.try_to_tell(_S.DOWN, None, f"its engine does not answer: {why}{look}")
            # The remedy for long steps is none for a server that makes no step at all.
            await self.reporter.tell_slow(None)
        elif state is _S.STALE and self.standstill.cause is None:  # it serves nothing anyway: this is why
            await self.reporter.try_to_tell(_S.STALE, None, f"its engine does not answer: {why}")

    def _note_silent_since(self, asked: float) -> float:
        """Note a question without an answer, and return when the first of those in a row was asked."""
        self._silent_since = asked if self._silent_since is None else self._silent_since
        return self._silent_since

    async def _stands_still(self, state: EngineState) -> bool:
        """Return whether the server generates nothing, or has not shown yet that it does again. Tells the queue."""
        if (cause := self.standstill.look(state)) is not None:
            self.waits_for = "a person's POST /resume" if self.standstill.by_person else cause
            await self.standstill.tell()
            return True
        if self.standstill.must_step:
            self.waits_for = "a token that it generates, after it could not"
            self.standstill.must_step = not await self._sync.generates(self._step_s)
        return self.standstill.must_step

    async def _bring(self, state: EngineState) -> None:
        """Publish the newest version to the server, and tell the queue the outcome."""
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
                await self.reporter.tell(_S.SYNCING)
            outcome = await self.attempt.run(partial(self._sync.publish, snapshot))
            whole = True
            took_s = time.monotonic() - began
            await self._note_proven(snapshot, ServerMetrics.of(outcome, took_s, self.reporter.transport))
        except (*PUBLISH_ERRORS, TimeoutError) as error:
            await self._failed(snapshot, state, error)
        except QueueRefused as refusal:
            # It registered again or was removed meanwhile: the registry, which is read soon, says which.
            self._forget_process()
            self._note_failure(snapshot.version, f"{self.name}: {refusal}")
        except asyncio.CancelledError:
            if self._sync.left_paused:
                await shielded(self.reporter.leave_quarantined(snapshot.version))
            task = asyncio.current_task()
            if not self.attempt.given_up or (task is not None and task.cancelling()):
                raise
            self._note_unproven(snapshot)
            self._note_failure(snapshot.version, f"{self.server.url}: given up for a newer version")
        finally:
            self._snapshots.give_back(self.name, snapshot, whole)

    def _note_unproven(self, snapshot: Snapshot) -> None:
        """Keep what proves a version that may have been swapped in. An adapter serves only once it is proven."""
        if snapshot.adapter_config is None:
            self._unproven = Swapped.of(snapshot)

    async def _prove_again(self, state: EngineState) -> None:
        """Ask for the proof of a version that was swapped in and whose proof did not end, before a newer one is
        published, whose proof would count for it too (I5). A call that fails is no verdict."""
        unproven = self._unproven
        if unproven is None or time.monotonic() < self._next_try:
            return
        if state.label != unproven.label:
            self._unproven = None
            return
        version, began = unproven.version, time.monotonic()
        self.waits_for = f"the proof of version {version}"
        try:
            outcome = await self.attempt.run(partial(self._sync.prove, unproven))
        except ProofFailed as failure:
            self._unproven = None
            await self.reporter.quarantine(version, str(failure))
            self._note_failure(version, str(failure), at_once=True)
        except (ControlError, TimeoutError) as error:
            reason = self._reason(error)
            await self.reporter.proof_unasked(version, reason)
            self._note_failure(version, reason)
        else:
            self._unproven = None
            metrics = ServerMetrics.of(outcome, time.monotonic() - began, self.reporter.transport)
            await self._note_proven(unproven, metrics)

    async def _note_answer(self, why: str | None, asked: float) -> None:
        """Note an answer during a publication. `why`: the engine gave none when it was asked; None: it did."""
        if why is None:
            self._silent_since = None
        else:
            await self._note_silence(why, asked)

    async def _note_state(self, state: EngineState) -> None:
        """Take the server out of service if it generates nothing during a publication, which may take long."""
        if self.standstill.look(state) is not None and self.server.state is _S.SERVING:
            await self.standstill.tell()

    async def _note_proven(self, snapshot: Snapshot | Swapped, metrics: ServerMetrics) -> None:
        # A version that took long is old by now: serving it would hold up admission until the newest is there.
        known = self.server.state in (_S.SERVING, _S.DRAINING)
        stands = self.standstill.cause is not None or self.standstill.must_step
        if not stands and (known or not self._fleet.would_be_stale(self, snapshot.version, metrics.took_s)):
            if not known and self.server.state is not _S.SYNCING:
                await self.reporter.tell(_S.SYNCING)
            proof = Proof(snapshot.version, metrics.probe_max_abs_diff, metrics.transfer_s, metrics.pause_s)
            await self.reporter.tell(_S.SERVING, snapshot.version, proof=proof)
        self.version, self.failures, self.waits_for, self._took_s = snapshot.version, 0, None, metrics.took_s
        self.behind_since, self._labels = None, {snapshot.label}
        self._fleet.proven(self, snapshot.version, metrics)

    async def _failed(self, snapshot: Snapshot, before: EngineState, error: Exception) -> None:
        reason = self._reason(error)
        mismatch, now = isinstance(error, ProofFailed), None
        must_leave = mismatch or self._sync.left_paused
        if not must_leave:
            asked = time.monotonic()
            with suppress(ControlError, TimeoutError):  # the next look tells of the silence, which begins here
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    now = await self._sync.control.state()
            if now is None:
                self._note_silent_since(asked)
            if now is None or now.label == snapshot.label:
                self._note_unproven(snapshot)
        await self.reporter.publication_failed(snapshot, reason, must_leave, now)
        self._note_failure(snapshot.version, reason, at_once=mismatch and self.failures == 0)

    def _reason(self, error: Exception) -> str:
        return str(error) or f"{self.server.url}: not done within weight_sync.timeout_s = {self._timeout_s:g} s"

    def _note_failure(self, version: int, reason: str, at_once: bool = False) -> None:
        self.failures += 1
        pause_s = 0.0 if at_once else retry_pause_s(self.failures)
        self._next_try = time.monotonic() + pause_s
        self.waits_for = f"another try of version {version} or newer, in {pause_s:.0f} s: {reason}"
        self._publications.failed(self.name, version, reason)

    def _forget_process(self) -> None:
        self.version, self._boot, self.failures, self._next_try = None, None, 0, 0.0
        self.behind_since, self._labels, self._unproven, self._step_s = None, set(), None, 0.0
        self.standstill.forget()

    async def _pause(self) -> None:
        """Wait until there is something to publish, or the next look is due."""
        left = self._next_try - time.monotonic()
        pause_s = min(LOOK_EVERY_S, left) if left > 0 else 0.0 if self._can_try() else LOOK_EVERY_S
        with suppress(TimeoutError):
            async with asyncio.timeout(max(pause_s, 0.001)):
                await self._wake.wait()

    def _can_try(self) -> bool:
        stands = self.standstill.cause is not None or self.standstill.must_step
        barred = self._eligibility.reason is not None or stands or self._no_room
        return self.answers and not barred and not self.up_to_date and self._snapshots.newest is not None
