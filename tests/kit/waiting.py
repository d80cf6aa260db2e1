"""Simulates a run in simulated time, so that its results do not depend on the machine.

Admission and slots are the real ones. Servers, tools, judges and the learner are waits of known length.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.rollout_queue.ledger.admission import Admission, Grant, QueueLoad, StepFacts
from slipstream.rollout_worker.episodes.capacity import Capacity
from tests.kit.config import config

GROUP_SIZE, GROUPS_PER_STEP = 8, 8
TRAIN_S, TURN_S, TURNS = 0.3, 0.3, 2


class _Skipping(selectors.SelectSelector):
    """Returns at once, and adds up the seconds that it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.skipped_s += max(0.0, timeout or 0.0)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Is an event loop without waits or a clock. Its time advances by the length of its timers."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped_s


class Slots(Protocol):
    """Shares a worker's capacity to generate among its groups."""

    async def room(self) -> int: ...
    # Yields a function that makes the context of a turn. Its argument says whether the turn is an episode's first.
    @asynccontextmanager
    def group(self) -> AsyncIterator[Callable[[bool], Any]]: ...


class NewSlots:
    """Shares slots as the worker does, with `Capacity`."""

    def __init__(self, total: int, max_open: int, resets: bool) -> None:
        self.capacity = Capacity(total, max_open, asyncio.get_running_loop().time)
        self._resets = resets

    async def room(self) -> int:
        return await self.capacity.wait_for_room(GROUP_SIZE)

    @asynccontextmanager
    async def group(self) -> AsyncIterator[Callable[[bool], Any]]:
        reservation = self.capacity.begin(GROUP_SIZE)
        if self._resets:
            reservation.give_all()
        granted = asyncio.Semaphore(0)

        async def take() -> None:
            async for count in reservation.parts():
                for _ in range(count):
                    granted.release()

        @asynccontextmanager
        async def turn(first: bool) -> AsyncIterator[None]:
            if first and not self._resets:
                await granted.acquire()
                try:
                    yield
                finally:
                    reservation.give()
                return
            async with self.capacity.turn(begun=not first):
                yield

        taking = asyncio.create_task(take())
        try:
            yield turn
            self.capacity.cautious = False
        finally:
            taking.cancel()
            self.capacity.end(GROUP_SIZE, reservation)


class HeldSlots:
    """Shares slots as the worker did before: a group holds its slots until it is submitted."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._freed = asyncio.Event()

    async def room(self) -> int:
        while self._free < GROUP_SIZE:
            self._freed.clear()
            await self._freed.wait()
        return self._free // GROUP_SIZE

    @asynccontextmanager
    async def group(self) -> AsyncIterator[Callable[[bool], Any]]:
        @asynccontextmanager
        async def turn(first: bool) -> AsyncIterator[None]:
            yield

        self._free -= GROUP_SIZE
        try:
            yield turn
        finally:
            self._free += GROUP_SIZE
            self._freed.set()


@dataclass
class Scene:
    """Holds the waits of a run, in seconds, and its bounds.

    Attributes:
        tool: Draws the seconds of a tool call.
        reset_s: Seconds before the first turn of an episode.
        judge_s: Seconds after the episodes of a group.
        sequences: Number of sequences that the servers run at the same time.
        max_staleness: Maximum staleness in versions.
        steps: Number of optimiser steps.
        workers: Number of workers.
    """

    tool: Callable[[random.Random], float] = lambda rng: 0.0
    reset_s: float = 0.0
    judge_s: float = 0.0
    sequences: int = 64
    max_staleness: int = 4
    steps: int = 60
    workers: int = 1


@dataclass
class Found:
    """Holds the results of a run.

    Attributes:
        step_s: Mean seconds of a step over the second half, when the depth has settled.
        staleness_mean: Mean staleness in versions.
        staleness_max: Maximum staleness in versions.
        dropped: Number of groups dropped because they were too old.
        depth: Depth at the end, in optimiser steps.
        by_worker: Number of groups that each worker began.
        max_open: Maximum number of open episodes at one time.
    """

    step_s: float
    staleness_mean: float
    staleness_max: int
    dropped: int
    depth: float
    by_worker: list[int] = field(default_factory=list)
    max_open: int = 0


def tail(rng: random.Random) -> float:
    """Draw seconds with a long tail: a tenth of a second times Pareto 1.2, at most 8 s."""
    return min(8.0, 0.1 * rng.paretovariate(1.2))


def simulate(scene: Scene, slots: Callable[[], Slots], seed: int = 0) -> Found:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(_Run(scene, seed).run([slots] * scene.workers))


class _Run:
    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene, self.rng = scene, random.Random(seed)
        self.admission = Admission(
            config(learner={"groups_per_step": GROUPS_PER_STEP}, queue={"max_staleness": scene.max_staleness})
        )
        self.version = self.outstanding = self.open = self.max_open = self.dropped = 0
        self.ready: list[int] = []  # versions that sampled the groups
        self.changed = asyncio.Condition()
        self.sequences = asyncio.Semaphore(scene.sequences)

    async def run(self, makers: list[Callable[[], Slots]]) -> Found:
        made = [0] * len(makers)
        ages: list[int] = []
        times: list[float] = []
        workers = [asyncio.create_task(self.worker(make(), made, place)) for place, make in enumerate(makers)]
        for _ in range(self.scene.steps):
            ages += await self.step(times)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        late = times[len(times) // 2 :]
        return Found(
            round(statistics.mean(late), 3),
            round(statistics.mean(ages), 3),
            max(ages),
            self.dropped,
            self.admission.depth,
            made,
            self.max_open,
        )

    async def step(self, times: list[float]) -> list[int]:
        """Run one optimiser step.

        Args:
            times: Gets the step's seconds appended.

        Returns:
            The ages of its groups, in versions.
        """
        now = asyncio.get_running_loop().time
        began, dropped = now(), 0
        async with self.changed:
            while True:
                old = [version for version in self.ready if self.version - version > self.scene.max_staleness]
                for version in old:
                    self.ready.remove(version)
                dropped += len(old)
                self.outstanding -= len(old)
                if old:
                    self.changed.notify_all()
                if len(self.ready) >= GROUPS_PER_STEP:
                    break
                await self.changed.wait()
            batch, self.ready = self.ready[:GROUPS_PER_STEP], self.ready[GROUPS_PER_STEP:]
        waited_s = now() - began
        await asyncio.sleep(TRAIN_S)
        ages = [self.version - version for version in batch]
        self.dropped += dropped
        async with self.changed:
            self.outstanding -= len(batch)
            self.version += 1
            self.admission.observe_step(StepFacts(len(batch), dropped, waited_s / (now() - began)))
            self.changed.notify_all()
        times.append(now() - began)
        return ages

    async def worker(self, slots: Slots, made: list[int], place: int) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                room = await slots.room()
                for _ in range(await self.tickets(room)):
                    self.open += GROUP_SIZE
                    self.max_open = max(self.max_open, self.open)
                    made[place] += 1
                    groups.create_task(self.group(slots))
                    await asyncio.sleep(0)

    async def tickets(self, wanted: int) -> int:
        async with self.changed:
            while not (grant := self.grant()).count:
                self.admission.observe_refusal(grant)
                await self.changed.wait()
            count = min(wanted, grant.count)
            self.outstanding += count
            return count

    def grant(self) -> Grant:
        return self.admission.grant(QueueLoad(self.outstanding, 0, self.version, self.version, session=1))

    async def group(self, slots: Slots) -> None:
        async with slots.group() as turn:
            versions = await asyncio.gather(*(self.episode(turn) for _ in range(GROUP_SIZE)))
            await asyncio.sleep(self.scene.judge_s)
            self.open -= GROUP_SIZE
            async with self.changed:
                self.ready.append(min(versions))
                self.changed.notify_all()

    async def episode(self, turn: Callable[[bool], Any]) -> int:
        """Run an episode and return the version that sampled its first turn."""
        await asyncio.sleep(self.scene.reset_s)
        version = None
        for number in range(TURNS):
            async with turn(number == 0), self.sequences:
                version = self.version if version is None else version
                await asyncio.sleep(TURN_S * self.rng.uniform(0.5, 1.5))
            if number < TURNS - 1:
                await asyncio.sleep(self.scene.tool(self.rng))
        assert version is not None
        return version
