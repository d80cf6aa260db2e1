"""State of the engine that vLLM's API process keeps, beyond the engine's own answers: owner, pause lease, wholeness,
health.

A server belongs to one run at a time (I5): from its first control call on, as long as its learner calls, which is every
two seconds. A run that says goodbye, or is silent for `SILENT_S`, leaves it to the next that calls. Calls without the
header `slipstream-run` are a person's and own nothing: no pause under a lease either.

The engine is asked now and then, so that one that hangs in a collective does not stay behind a server that still
answers. Silence is counted in questions, not in seconds: a process that was stopped and continued has missed one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import psutil
from starlette.types import Scope

from slipstream.protocol.engine import COMPUTES, NO_ANSWER, STOPPED
from slipstream.protocol.versions import RUN_HEADER, RUN_ID
from slipstream.weight_sync.server.answers import serves_another_run
from slipstream.weight_sync.transports.http import chunks
from slipstream.weight_sync.vllm import guard
from slipstream.weight_sync.vllm.engine.contract import EngineClient

logger = logging.getLogger(__name__)

Handler = Callable[[Any, dict[str, Any]], Awaitable[msgspec.Struct]]

SILENT_S = 30.0
STATE = "/slipstream/state"
LEASE = "/slipstream/lease"

# Asks for a pause under a lease, and names its holder.
LEASE_HEADER = b"slipstream-owner"

# From the first refusal to the end of the process, so that callers are told why.
TELL_S = 3.0
EXIT_CODE = 70
ASK_EVERY_S = 5.0

# Seconds between checks for a dead engine, which need no question to it. vLLM ends soon after, without the cause.
LOOK_EVERY_S = 0.5

# An engine answers between two steps, and the longest prefill is one step. It has `ANSWER_STEPS` of its longest ones
# lately, and at least `ANSWER_WITHIN_S`.
ANSWER_WITHIN_S = 15.0
ANSWER_STEPS = 2.0
QUESTIONS = 8

# Seconds without a step after which an engine that has requests counts as stalled, if `STALLED_STEPS` of its longest
# steps lately take no longer.
STALLED_AFTER_S = 10.0
STALLED_STEPS = 3.0


# Seconds for which the engine's processes are watched when it does not answer, and the share of a core from which on
# they compute: on a busy host they get little of one.
ACTIVE_WITHIN_S = 0.3
ACTIVE_SHARE = 0.1


class RouteError(Exception):
    """A refusal, answered with `status` and `message`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class Owner:
    """The run that a server belongs to.

    Attributes:
        run: Id of the last owner, "" before the first.
        heard_at: When it called last, in seconds of any steady clock.
    """

    run: str = ""
    heard_at: float = 0.0

    def live(self, now: float) -> str:
        """Return the owner's id, "" if it has been silent for too long."""
        return self.run if now - self.heard_at < SILENT_S else ""

    def silent_s(self, now: float) -> float:
        """Return the seconds since the owner called, 0 without one."""
        return now - self.heard_at if self.live(now) else 0.0

    def admits(self, run: str, now: float) -> bool:
        """Return whether `run`, which makes a control call, is the owner. It becomes the owner if there is none."""
        if self.live(now) not in ("", run):
            return False
        self.run, self.heard_at = run, now
        return True

    def leaves(self, run: str) -> None:
        """End the ownership of `run`, whose learner said goodbye."""
        if self.run == run:
            self.run = ""


def check_owner(owner: Owner, scope: Scope, now: float | None = None) -> None:
    """Check that the request comes from the server's owner, before anything else is done with it.

    Raises:
        RouteError: 409 for a control call of another run than the owner; 400 for a run id that is none; 403 for a
            lease without a run. A request for the state passes, as its answer names the owner.
    """
    path = guard.route_of(scope)
    if path.startswith(chunks.CHUNKS_PREFIX) or path == guard.HEALTH or guard.roles_for(path) != ("learner",):
        return  # callers without control over the server use these routes, and must not come to own it
    headers = dict(scope["headers"])
    run = headers.get(RUN_HEADER.encode(), b"").decode("latin-1")
    if not run:
        if path == LEASE or LEASE_HEADER in headers:
            raise RouteError(
                403,
                f"a pause under a lease is for the learner of a run, whose id stands in the header {RUN_HEADER}; to "
                f"pause by hand leave out the header {LEASE_HEADER.decode()}",
            )
        return
    if not re.fullmatch(RUN_ID, run):
        raise RouteError(400, f"{RUN_HEADER}: {run[:80]!r} is not the id of a run")
    now = time.monotonic() if now is None else now
    if not owner.admits(run, now) and path != STATE:
        raise RouteError(409, serves_another_run("this server", owner.run, owner.silent_s(now)))


def end_the_process() -> None:
    """End this server at once with `EXIT_CODE`: an engine that hangs would hold up an orderly end."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.Error:
            continue
    os._exit(EXIT_CODE)


def why_unanswered(server: psutil.Process) -> str:
    """Look at the processes below `server`, of which one is the engine that does not answer. Blocks for
    `ACTIVE_WITHIN_S`. Returns one of `protocol.engine.MAY_ANSWER`."""
    before, states = _cpu_s(server)
    time.sleep(ACTIVE_WITHIN_S)
    after, states_after = _cpu_s(server)
    if psutil.STATUS_STOPPED in states_after:
        return STOPPED
    used_s = sum(seconds - before.get(pid, seconds) for pid, seconds in after.items())
    runs = psutil.STATUS_RUNNING in states and psutil.STATUS_RUNNING in states_after
    return COMPUTES if runs or used_s >= ACTIVE_SHARE * ACTIVE_WITHIN_S else NO_ANSWER


def _cpu_s(server: psutil.Process) -> tuple[dict[int, float], set[str]]:
    """Return the CPU seconds of each process below `server`, and their states."""
    seconds, states = dict[int, float](), set[str]()
    for child in server.children(recursive=True):
        with suppress(psutil.Error), child.oneshot():
            times = child.cpu_times()
            seconds[child.pid] = times.user + times.system
            states.add(child.status())
    return seconds, states


class Progress:
    """Finds out whether an engine that has requests steps."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[Any, float]] = {}
        self._looked_at = 0.0

    def why_stalled(self, states: list[dict[str, Any]], now: float) -> str | None:
        """Look at the engines' states once more. Returns why nothing is generated; None where it may be.

        Looks that are further apart than an engine may take for its steps show nothing: it may have stepped between
        them.
        """
        after_s = max(STALLED_AFTER_S, STALLED_STEPS * max((state["step_s"] for state in states), default=0.0))
        if now - self._looked_at >= after_s:
            self._at = {}
        self._looked_at = now
        for engine, state in enumerate(states):
            place = None if state["paused"] or not (state["running"] or state["waiting"]) else state["place"]
            if place is None or self._at.get(engine, (None, now))[0] != place:
                self._at[engine] = (place, now)
            elif now - self._at[engine][1] >= after_s:
                what = "has made no step" if state["running"] else "lets requests wait and runs none"
                return f"its engine {what} for {after_s:.0f} s"
        return None


@dataclass
class EngineStatus:
    """Facts that the API process keeps about its engine.

    Attributes:
        boot: Another text after each start.
        whole: Whether the live model is whole: False from the first touch of it until it is known to be whole again.
        broken: Why this server must not generate any more, None while it may.
        user_pause: Whether a person paused it.
        adapter: Label of the adapter that serves, None while the base's weights do.
        scale_out: Whether it generates from token ids.
        progress: Whether the engine steps.
        step_s: Seconds of its longest step lately, as of its newest answer.
        swapped: Set at the end of the running swap, None without one.
        owner: The run that it belongs to.
        lease_owner: Holder of the pause of a publication, None without one.
        lease_run: Id of the run to whose learner that lease was given.
        lease_ends: Timer that ends that pause.
        ending: The task that resumes after a lease that was not renewed.
        heartbeat: The task that watches the engine.
        running: Tasks of requests in flight.
        end: Ends the process.
    """

    boot: str = field(default_factory=lambda: secrets.token_hex(6))
    whole: bool = True
    broken: str | None = None
    user_pause: bool = False
    adapter: str | None = None
    scale_out: bool = False
    progress: Progress = field(default_factory=Progress)
    step_s: float = 0.0
    swapped: asyncio.Event | None = None
    owner: Owner = field(default_factory=Owner)
    lease_owner: str | None = None
    lease_run: str = ""
    lease_ends: asyncio.TimerHandle | None = None
    ending: asyncio.Task[None] | None = None
    heartbeat: asyncio.Task[None] | None = None
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    end: Callable[[], None] = end_the_process

    @property
    def pause_owner(self) -> Literal["none", "person", "publication"]:
        """Names who paused it: "publication", "person" or "none"."""
        if self.lease_ends is not None:
            return "publication"
        return "person" if self.user_pause else "none"

    def break_down(self, reason: str) -> None:
        """Refuse everything from now on, fail requests in flight, and end the process after `TELL_S`."""
        if self.broken is not None:
            return
        self.broken = reason
        logger.error("this server does not generate any more: %s; it ends in %g s", reason, TELL_S)
        for task in self.running:
            task.cancel()
        timer = threading.Timer(TELL_S, self.end)
        timer.daemon = True
        timer.start()


def status_of(engine: EngineClient) -> EngineStatus:
    """Return the status of this engine's client, made at the first call."""
    found = getattr(engine, "slipstream_status", None)
    if found is None:
        found = engine.slipstream_status = EngineStatus()
    status: EngineStatus = found
    return status


async def watch(engine: EngineClient, status: EngineStatus, ask: Callable[[Any, float], Awaitable[Any]]) -> None:
    """Break the server down when the engine is dead, or has not answered `QUESTIONS` times in a row.

    While a publication holds the pause its lease counts instead.

    Args:
        ask: Called with the engine's client and a time-out in seconds; returns None if no answer came.
    """
    silent, asked_at = 0, time.monotonic()
    while status.broken is None:
        await asyncio.sleep(min(LOOK_EVERY_S, ASK_EVERY_S))
        if (why := how_it_died(engine)) is not None:
            status.break_down(why)
            return
        if time.monotonic() - asked_at < ASK_EVERY_S:
            continue
        if getattr(engine, "errored", False):
            status.break_down("the engine died")
            return
        within_s = max(ANSWER_WITHIN_S, ANSWER_STEPS * status.step_s)
        try:
            answered = await ask(engine, within_s) is not None
        except Exception as error:  # A question that fails counts as no answer.
            logger.warning("the engine could not be asked: %s", error)
            answered = False
        asked_at = time.monotonic()
        silent = 0 if answered or status.lease_ends is not None else silent + 1
        if silent >= QUESTIONS:
            status.break_down(f"the engine did not answer {QUESTIONS} times in a row, {within_s:g} s each")


def how_it_died(engine: EngineClient) -> str | None:
    """Return how a process of the engine ended by itself; None if the engine lives or is being shut down.

    vLLM knows the exit code and does not report it.
    """
    resources = getattr(getattr(engine, "engine_core", None), "resources", None)
    manager = getattr(resources, "engine_manager", None)
    name = getattr(manager, "failed_proc_name", None)
    code = manager.finished_procs().get(name) if manager is not None and name is not None else None
    if code is None:
        return None
    return f"its EngineCore process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
