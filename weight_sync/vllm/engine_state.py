"""What vLLM's API process knows of its engine beyond what the engine says: boot, wholeness, leases, and the end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from weight_sync.vllm.owner import Owner

logger = logging.getLogger(__name__)

# Between the first refusal and the end of the process, so that whoever asks is told why.
TELL_S = 3.0

EXIT_CODE = 70


def end_the_process() -> None:
    """End this server at once: its engine may hang, and would hold up any end in order."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.Error:
            continue
    os._exit(EXIT_CODE)


@dataclass
class EngineStatus:
    """boot: another after each start. whole: false from the first touch of the live model until it is known to be
    whole again. broken: why this server must not generate any more; None while it may. persons_pause: whether a
    person paused it. adapter: the label of what serves in place of the base's weights, None for those. lease_owner,
    lease_ends: who holds a pause for a publication, and what ends it; None if nobody. swapped: set at the end of the
    swap that is under way; None where none is. scale_out: whether it generates tokens from tokens. owner: the run
    that it serves."""

    boot: str = field(default_factory=lambda: secrets.token_hex(6))
    whole: bool = True
    broken: str | None = None
    persons_pause: bool = False
    adapter: str | None = None
    scale_out: bool = False
    swapped: asyncio.Event | None = None
    owner: Owner = field(default_factory=Owner)
    lease_owner: str | None = None
    lease_ends: asyncio.TimerHandle | None = None
    ending: asyncio.Task[None] | None = None
    heartbeat: asyncio.Task[None] | None = None
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    end: Callable[[], None] = end_the_process

    @property
    def pause_owner(self) -> str:
        if self.lease_ends is not None:
            return "publication"
        return "person" if self.persons_pause else "none"

    def break_down(self, reason: str) -> None:
        """Refuse everything from now on, fail what is in flight, and end the process after `TELL_S`."""
        if self.broken is not None:
            return
        self.broken = reason
        logger.error("this server does not generate any more: %s; it ends in %g s", reason, TELL_S)
        for task in self.running:
            task.cancel()
        timer = threading.Timer(TELL_S, self.end)
        timer.daemon = True
        timer.start()


def condition_of(engine: Any) -> EngineStatus:
    """The one of this engine's client."""
    found = getattr(engine, "slipstream_condition", None)
    if found is None:
        found = engine.slipstream_condition = EngineStatus()
    condition: EngineStatus = found
    return condition
