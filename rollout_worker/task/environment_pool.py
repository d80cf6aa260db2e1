"""Environments that are made as they are needed, reset between episodes, and always closed.

An instance serves one episode at a time. One that is `lost`, or that a call is still at work on, is not used again.
Everything of the user's, the end of an object included, runs behind the boundary (I9).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any

from rollout_worker.task.environment.face import Face
from rollout_worker.task.environment.instance import GRACE_S, Holder, Instance
from rollout_worker.task.environment.making import Factory, Making
from rollout_worker.user_code import Kind, UserCode, UserCodeError
from rollout_worker.user_code.errors import is_async

logger = logging.getLogger(__name__)

# All that are left are closed in this time when a worker ends: less than a supervisor waits before it kills.
CLOSE_S = 8.0

Trouble = Callable[[str, str, str | None], None]


class Pool:
    """Instances of `factories`, by name. timeout_s: of a factory's call, and of a close; most: instances in all, before
    idle ones of other names are closed for new ones; trouble(key, text, where): told of what fails unseen."""

    def __init__(self, factories: Mapping[str | None, Factory], code: UserCode, timeout_s: float) -> None:
        self.factories = dict(factories)
        self.most = sys.maxsize
        self.alive = 0
        self.trouble: Trouble = lambda key, text, where: logger.warning("%s", text)
        self._code = code
        self._timeout_s = timeout_s
        self._idle: dict[str | None, list[Instance]] = {name: [] for name in factories}
        self._out: set[Instance] = set()
        self._faces: dict[str | None, Face] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        # Those whose caller has gone.
        self._given_up: list[Making] = []

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def take(self, name: str | None) -> Instance:
        """An instance that no other episode has, to be given back once. Raises `UserCodeError` where none can be
        made."""
        if self._idle[name]:
            instance = self._idle[name].pop()
        else:
            if self.alive >= self.most and (others := next((kept for kept in self._idle.values() if kept), None)):
                self._discard(others.pop(0))
            instance = await self._made(name)
        self._out.add(instance)
        return instance

    def give_back(self, instance: Instance) -> None:
        """After its episode; it is used again, or closed."""
        if instance not in self._out:  # closed with the pool
            return
        if not (instance.free or instance.lost):
            _spawn(self._settled(instance), self._settling)
            return
        self._out.discard(instance)
        if instance.lost:
            self._discard(instance)
        else:
            self._idle[instance.name].append(instance)

    async def close(self) -> None:
        """Close every instance, those that are out or still being made too. Returns within `CLOSE_S`."""
        for task in self._settling:
            task.cancel()
        for instance in [*self._out, *(each for kept in self._idle.values() for each in kept)]:
            self._discard(instance)
        self._out.clear()
        for kept in self._idle.values():
            kept.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                for making in self._given_up:
                    await making.over.wait()
                if self._ends:
                    await asyncio.wait(self._ends)
        if unmade := sum(not making.over.is_set() for making in self._given_up):
            logger.warning("%d environments were still being made after %g s, and are not closed", unmade, CLOSE_S)
        if late := set(self._ends):
            for task in late:
                task.cancel()
            logger.warning("%d environments were not closed within %g s", len(late), CLOSE_S)
            await asyncio.wait(late)

    async def _made(self, name: str | None) -> Instance:
        making = Making(self.factories[name], self._unwanted)
        self.alive += 1
        try:
            made, face = await making.made(self._code, self._timeout_s)
        except BaseException:
            self.alive -= 1
            if not making.over.is_set():
                self._given_up = [each for each in self._given_up if not each.over.is_set()] + [making]
            raise
        instance = Instance(name, made, face, self._code)
        if not self._faces.setdefault(name, face).has(face):
            text = f"it gave a {face.cls} with other methods than before; give instances of one class"
            self._discard(instance)
            raise UserCodeError(text, "TypeError", making.where)
        return instance

    def _unwanted(self, making: Making, holder: Holder) -> None:
        self.alive += 1
        _spawn(self._ended(making.name, making.closing, holder), self._ends)

    async def _settled(self, instance: Instance) -> None:
        """Given back while a call is at work on it, which was cancelled with its episode."""
        if not await instance.until_free(max(GRACE_S, self._timeout_s)):
            instance.lost = True
        self.give_back(instance)

    def _discard(self, instance: Instance) -> None:
        face = instance.face
        _spawn(self._ended(face.cls, _closing(face), instance.emptied()), self._ends)

    async def _ended(self, cls: str, closing: Callable[..., Any], holder: Holder) -> None:
        """Close it, where it has a `close`, and let go of it where it was used."""
        try:
            await self._code.call(closing, _none, self._timeout_s, Kind.CLOSE, holder=holder)
        except UserCodeError as error:
            self.trouble(f"close {cls} {error.kind}", f"{cls}.close failed: {error}", error.where)
        finally:
            self.alive -= 1


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _closing(face: Face) -> Callable[..., Any]:
    """What closes the held object of this face, if it can be closed, and lets go of it."""
    close = face.methods.get("close")
    if close is None:
        return lambda holder: _none(holder())
    if is_async(close):

        async def asynchronous(holder: Holder) -> None:
            await holder().close()

        return wraps(close)(asynchronous)

    def synchronous(holder: Holder) -> Any:
        return holder().close()

    return wraps(close)(synchronous)


def _none(result: Any) -> None:
    """Whatever a close returns."""
