"""Environments that are made as they are needed, reset between episodes, and always closed.

An instance serves one episode at a time. One that is `lost`, or that a call is still at work on, is not used again.
Everything of the user's, the end of an object included, runs behind the boundary (I9).

One environment in the making, which is closed also where nobody waits for it any more.

A constructor in a thread cannot be stopped: it may come back long after its time-out, or after its episode has gone,
and what it made must be closed all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial, wraps
from typing import Any, TypeAlias

from rollout_worker.task.environment_instance import GRACE_S, EnvironmentInterface, Holder, Instance, interface_of
from rollout_worker.user_code import Followed, Kind, UserCode, UserCodeError, defined_at
from rollout_worker.user_code.errors import is_async, name_of

Factory: TypeAlias = Callable[..., Any]


class PendingInstance:
    """One call of `factory`. unwanted(self, holder): gets, on the event loop that made this, what is made after all
    when its caller has gone, to be closed by `closing`; name, where: of the factory, file:line."""

    def __init__(self, factory: Factory, unwanted: Callable[[PendingInstance, Holder], None]) -> None:
        self.name = name_of(factory)
        self._named = _named(factory)
        self.where = defined_at(self._named)
        self._unwanted = unwanted
        self._loop = asyncio.get_running_loop()
        # Each side writes its own before it reads the other's, so that what is made is never missed by both.
        self._made: list[Any] = []
        self._given_up = False
        self._call = Followed(factory, self._named, self._came)

    @property
    def over(self) -> asyncio.Event:
        """Set when the factory is not at work, nor ever will be, and `unwanted` has got what it is to get."""
        return self._call.back

    async def made(self, code: UserCode, timeout_s: float) -> tuple[Any, EnvironmentInterface]:
        """What the factory gives, and what that can do. Raises `UserCodeError`."""
        faces: list[EnvironmentInterface] = []

        def plain(found: Any) -> None:
            faces.append(interface_of(found))

        try:
            await code.call(self._call.function, plain, timeout_s, Kind.ENVIRONMENT)
        except BaseException:
            self._given_up = True
            self._discard()
            raise
        finally:
            self._call.let_go()
        return self._made.pop(), faces.pop()

    @property
    def closing(self) -> Callable[[Holder], Any]:
        """What closes the held object, which nobody has looked at, if it can be closed, and lets go of it."""

        @wraps(self._named)
        def close(holder: Holder) -> Any:
            made = holder()
            return made.close() if "close" in interface_of(made).methods else None

        return close

    def _came(self, found: Any) -> None:
        """Where the factory ran."""
        self._made.append(found)
        if self._given_up:
            with contextlib.suppress(RuntimeError):  # the loop may be gone by now
                self._loop.call_soon_threadsafe(self._discard)

    def _discard(self) -> None:
        if self._made:
            self._unwanted(self, Holder(self._made.pop()))


def _named(factory: Factory) -> Factory:
    """The function behind `factory`, which errors are to name: a class's constructor, what a partial calls."""
    while isinstance(factory, partial):
        factory = factory.func
    if inspect.isroutine(factory):
        return factory
    if not inspect.isclass(factory):
        called: Factory = type(factory).__call__
        return called
    constructor = getattr(factory, "__init__", None)
    return constructor if inspect.isfunction(constructor) else factory


logger = logging.getLogger(__name__)

# All that are left are closed in this time when a worker ends: less than a supervisor waits before it kills.
CLOSE_S = 8.0

# Takes key, text and place (file:line) of a failure of user code that nobody waits for.
Notify = Callable[[str, str, str | None], None]


def log_notice(key: str, text: str, where: str | None) -> None:
    logger.warning("%s", text)


class Pool:
    """Instances of `factories`, by name, made when they are needed and used again.

    Args:
        factories: By name; the name is None where there is only one.
        timeout_s: Seconds for a factory's call, and for a close.
        max_alive: Number of instances from which idle ones of other names are closed for new ones.
        notify: Called with a close that fails.
    """

    def __init__(
        self,
        factories: Mapping[str | None, Factory],
        code: UserCode,
        timeout_s: float,
        max_alive: int = sys.maxsize,
        notify: Notify = log_notice,
    ) -> None:
        self.factories = dict(factories)
        self.alive = 0
        self._max_alive = max_alive
        self._notify = notify
        self._code = code
        self._timeout_s = timeout_s
        self._idle: dict[str | None, list[Instance]] = {name: [] for name in factories}
        self._out: set[Instance] = set()
        self._interfaces: dict[str | None, EnvironmentInterface] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        # Those whose caller has gone.
        self._given_up: list[PendingInstance] = []

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def take(self, name: str | None) -> Instance:
        """An instance that no other episode has, to be given back once. Raises `UserCodeError` where none can be
        made."""
        if self._idle[name]:
            instance = self._idle[name].pop()
        else:
            if self.alive >= self._max_alive and (others := next((kept for kept in self._idle.values() if kept), None)):
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
        making = PendingInstance(self.factories[name], self._unwanted)
        self.alive += 1
        try:
            made, interface = await making.made(self._code, self._timeout_s)
        except BaseException:
            self.alive -= 1
            if not making.over.is_set():
                self._given_up = [each for each in self._given_up if not each.over.is_set()] + [making]
            raise
        instance = Instance(name, made, interface, self._code)
        if not self._interfaces.setdefault(name, interface).has(interface):
            text = f"it gave a {interface.cls} with other methods than before; give instances of one class"
            self._discard(instance)
            raise UserCodeError(text, "TypeError", making.where)
        return instance

    def _unwanted(self, making: PendingInstance, holder: Holder) -> None:
        self.alive += 1
        _spawn(self._ended(making.name, making.closing, holder), self._ends)

    async def _settled(self, instance: Instance) -> None:
        """Given back while a call is at work on it, which was cancelled with its episode."""
        if not await instance.until_free(max(GRACE_S, self._timeout_s)):
            instance.lost = True
        self.give_back(instance)

    def _discard(self, instance: Instance) -> None:
        interface = instance.interface
        _spawn(self._ended(interface.cls, _closing(interface), instance.emptied()), self._ends)

    async def _ended(self, cls: str, closing: Callable[..., Any], holder: Holder) -> None:
        """Close it, where it has a `close`, and let go of it where it was used."""
        try:
            await self._code.call(closing, _none, self._timeout_s, Kind.CLOSE, holder=holder)
        except UserCodeError as error:
            self._notify(f"close {cls} {error.kind}", f"{cls}.close failed: {error}", error.where)
        finally:
            self.alive -= 1


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _closing(interface: EnvironmentInterface) -> Callable[..., Any]:
    """What closes the held object of this interface, if it can be closed, and lets go of it."""
    close = interface.methods.get("close")
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
