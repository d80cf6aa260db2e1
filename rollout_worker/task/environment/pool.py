"""Environments that are made as they are needed, reset between episodes, and always closed.

An instance serves one episode at a time. One that is `lost`, or that a call is still at work on, is not used again.
Everything of the user's, the end of an object included, runs behind the boundary (I9).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any

from rollout_worker.task.environment.face import Face, face_of
from rollout_worker.task.environment.instance import GRACE_S, Holder, Instance
from rollout_worker.user_code import Kind, UserCode, UserCodeError, defined_at
from rollout_worker.user_code.failures import is_async

logger = logging.getLogger(__name__)

# All that are left are closed in this time when a worker ends: less than a supervisor waits before it kills.
CLOSE_S = 8.0

Factory = Callable[..., Any]
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
        """Close every instance, those that are out too. Returns within `CLOSE_S`."""
        for task in self._settling:
            task.cancel()
        for instance in [*self._out, *(each for kept in self._idle.values() for each in kept)]:
            self._discard(instance)
        self._out.clear()
        for kept in self._idle.values():
            kept.clear()
        if self._ends:
            _, late = await asyncio.wait(self._ends, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                logger.warning("%d environments were not closed within %g s", len(late), CLOSE_S)
                await asyncio.wait(late)

    async def _made(self, name: str | None) -> Instance:
        made: list[tuple[Any, Face]] = []
        given_up: list[None] = []
        loop = asyncio.get_running_loop()

        def plain(found: Any) -> None:
            """In a thread, also of a factory that was given up long ago."""
            made.append((found, face_of(found)))
            if given_up:
                with contextlib.suppress(RuntimeError):  # the loop may be gone by now
                    loop.call_soon_threadsafe(unwanted)

        def unwanted() -> None:
            if made:
                self.alive += 1
                self._discard(self._instance(name, *made.pop()))

        self.alive += 1
        try:
            await self._code.call(_named(self.factories[name]), plain, self._timeout_s, Kind.ENVIRONMENT)
        except BaseException:
            given_up.append(None)
            self.alive -= 1
            unwanted()
            raise
        instance = self._instance(name, *made.pop())
        if not self._faces.setdefault(name, instance.face).has(instance.face):
            text = f"it gave a {instance.face.cls} with other methods than before; give instances of one class"
            self._discard(instance)
            raise UserCodeError(text, "TypeError", defined_at(_named(self.factories[name])))
        return instance

    def _instance(self, name: str | None, made: Any, face: Face) -> Instance:
        return Instance(name, made, face, self._code)

    async def _settled(self, instance: Instance) -> None:
        """Given back while a call is at work on it, which was cancelled with its episode."""
        if not await instance.until_free(max(GRACE_S, self._timeout_s)):
            instance.lost = True
        self.give_back(instance)

    def _discard(self, instance: Instance) -> None:
        _spawn(self._ended(instance.face, instance.emptied()), self._ends)

    async def _ended(self, face: Face, holder: Holder) -> None:
        """Close it, where it has a `close`, and let go of it where it was used."""
        try:
            await self._code.call(_closing(face), _none, self._timeout_s, Kind.CLOSE, holder=holder)
        except UserCodeError as error:
            self.trouble(f"close {face.cls} {error.kind}", f"{face.cls}.close failed: {error}", error.where)
        finally:
            self.alive -= 1


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _named(factory: Factory) -> Factory:
    """`factory`, so that an error names the constructor's file where it is a class."""
    constructor = getattr(factory, "__init__", None)
    if not (inspect.isclass(factory) and inspect.isfunction(constructor)):
        return factory

    @wraps(constructor)
    def making() -> Any:
        return factory()

    return making


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
