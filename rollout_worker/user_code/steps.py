"""Which step of an event loop blocks it. A loop may also be slow because the machine is starved: then each of many
steps takes long, and none of them is to blame."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType

from rollout_worker.user_code.texts import encodable

# Looks without a sign of life at which something waited or computed, after which it is to blame. Looks, not seconds: a
# process that was stopped for a while has blocked nothing.
LOOKS = 8
# Looks at one step after which it is to blame in any case: it waits in many places (a loop of short sleeps).
MOST_LOOKS = 16 * LOOKS
# Of the time between looks: the CPU time of a thread that computes is above the one, of one that waits below the other.
# One that wants to compute and has no CPU is between them.
_COMPUTES, _WAITS = 0.5, 0.01


@dataclass(frozen=True, slots=True)
class Sighting:
    """A loop's thread at one moment. `step`: the callback that it runs, the same object for as long as it does; None
    if it is not seen; `place`: the instruction that it is at; `cpu_s`: seconds of CPU time that the thread has used."""

    step: object | None
    place: object
    cpu_s: float


def sighting(thread: int | None, clock: int | None) -> Sighting:
    """Of the thread of that number. clock: of its CPU time; None where there is none."""
    frame = innermost = sys._current_frames().get(thread or 0)
    while frame is not None and not _is_a_step(frame):
        frame = frame.f_back
    place = None if innermost is None else (innermost.f_code, innermost.f_lasti)
    return Sighting(frame, place, _cpu_s(clock))


def code_in(thread: int | None, files: Set[str | None]) -> tuple[str, str] | None:
    """Name and file:line of what the step of that thread runs: in one of `files`, if it is there."""
    found: FrameType | None = None
    frame = sys._current_frames().get(thread or 0)
    outermost = frame
    while frame is not None and not _is_a_step(frame):
        outermost = frame
        found = frame if frame.f_code.co_filename in files else found
        frame = frame.f_back
    found = found or outermost
    if frame is None or found is None:
        return None
    return encodable(found.f_code.co_qualname), encodable(f"{found.f_code.co_filename}:{found.f_lineno}")


def cpu_clock(thread: int) -> int | None:
    """The clock of a running thread's CPU time; None where the system has none (macOS). Once the thread has ended it
    can still be asked."""
    made = getattr(time, "pthread_getcpuclockid", None)
    return None if made is None else made(thread)


def blocks(seen: Sequence[Sighting], look_s: float) -> bool:
    """Whether the step seen last blocks its loop: calls had better go elsewhere. seen: at looks `look_s` seconds apart
    at a loop that gives no sign of life, oldest first."""
    looks = 0
    for each in reversed(seen):
        if each.step is not seen[-1].step:
            break
        looks += 1
    if looks < LOOKS or looks >= MOST_LOOKS:
        return looks >= MOST_LOOKS
    same = seen[-looks:]
    computes = same[-1].cpu_s - same[0].cpu_s >= _COMPUTES * LOOKS * look_s
    return same[-1].step is not None and (computes or _waits(same[-LOOKS:], look_s) == LOOKS - 1)


def holds_up(seen: Sequence[Sighting], look_s: float) -> bool:
    """Whether the step seen last is to blame that there is no sign of life: it blocks the loop, or is one of many that
    each wait for a while where they should await. seen: as of `blocks`."""
    waits_now = _waits(seen[-2:], look_s) == 1
    return blocks(seen, look_s) or (waits_now and _waits(seen, look_s) >= LOOKS - 1)


def _waits(seen: Sequence[Sighting], look_s: float) -> int:
    """How often one step was at the same instruction at two looks, and used no CPU between them."""
    return sum(
        one.step is not None
        and one.step is other.step
        and one.place == other.place
        and other.cpu_s - one.cpu_s <= _WAITS * look_s
        for one, other in pairwise(seen)
    )


def _is_a_step(frame: FrameType) -> bool:
    return frame.f_code is asyncio.Handle._run.__code__


def _cpu_s(clock: int | None) -> float:
    try:
        return 0.0 if clock is None else time.clock_gettime(clock)
    except OSError:  # the thread has ended
        return 0.0
