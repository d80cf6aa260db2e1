"""Makes environments when they are needed, uses them for one episode after another, and closes them.

Invariant: an instance serves one episode at a time. An instance that is `lost`, or that a call still uses, is not used
again. All user code runs behind the boundary, and so does the deletion of the user's objects (I9).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeAlias

from slipstream.rollout_worker.task.environment_instance import (
    GRACE_S,
    EnvironmentInterface,
    Holder,
    Instance,
    interface_of,
)
from slipstream.rollout_worker.user_code import Call, Kind, UserCode, UserCodeError, defined_at
from slipstream.rollout_worker.user_code.errors import name_of

Factory: TypeAlias = Callable[..., Any]

logger = logging.getLogger(__name__)

# Seconds to close all remaining environments when a worker ends. A supervisor waits longer than this before it kills.
CLOSE_S = 8.0


def _named(factory: Factory) -> Factory:
    """Return the function that errors name for `factory`: a class's constructor, or the function of a partial."""
    while isinstance(factory, partial):
        factory = factory.func
    if inspect.isroutine(factory):
        return factory
    if not inspect.isclass(factory):
        called: Factory = type(factory).__call__
        return called
    constructor = getattr(factory, "__init__", None)
    return constructor if inspect.isfunction(constructor) else factory


# Receives key, text and file:line of a failure in user code that nobody waits for.
Notify = Callable[[str, str, str | None], None]


def log_notice(key: str, text: str, where: str | None) -> None:
    logger.warning("%s", text)


class Pool:
    """Makes environment instances when they are needed and uses them again.

    Args:
        factories: Factories by name. The name is None if there is only one.
        code: Runs user code.
        timeout_s: Seconds for a factory's call, and for a close.
        max_alive: Number of instances from which a new one replaces an idle one of another name, if there is any.
        notify: Called with key, text and file:line if a close fails.

    Attributes:
        alive: Number of instances that are made or being made, and not yet closed.
        idle: Number of instances that wait for an episode.
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
        # Number of instances that are still being made and whose caller has gone.
        self._given_up = 0

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def take(self, name: str | None) -> Instance:
        """Take an instance that no other episode uses. Give it back once.

        Args:
            name: Name of its factory.

        Raises:
            UserCodeError: No instance can be made.
        """
        if self._idle[name]:
            instance = self._idle[name].pop()
        else:
            if self.alive >= self._max_alive and (others := next((kept for kept in self._idle.values() if kept), None)):
                self._discard(others.pop(0))
            instance = await self._made(name)
        self._out.add(instance)
        return instance

    def give_back(self, instance: Instance) -> None:
        """Give an instance back after its episode. It is used again or closed."""
        if instance not in self._out:  # It was closed with the pool.
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
        """Close every instance, including those that are in use or still being made. Returns within `CLOSE_S`."""
        for task in self._settling:
            task.cancel()
        for instance in [*self._out, *(each for kept in self._idle.values() for each in kept)]:
            self._discard(instance)
        self._out.clear()
        for kept in self._idle.values():
            kept.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._ends:
                    await asyncio.wait(self._ends)
        if unmade := self._given_up:
            logger.warning("%d environments were still being made after %g s, and are not closed", unmade, CLOSE_S)
        if late := set(self._ends):
            if len(late) > unmade:
                logger.warning("%d environments were not closed within %g s", len(late) - unmade, CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.wait(late)

    async def _made(self, name: str | None) -> Instance:
        factory, made = self.factories[name], list[Holder]()
        named = _named(factory)

        def read(found: Any) -> EnvironmentInterface:
            """Keep the environment, and read its interface. It runs where the factory ran."""
            made.append(Holder(found))
            return interface_of(found)

        call: Call | None = None
        self.alive += 1
        try:
            call = self._code.begin(factory, read, self._timeout_s, Kind.ENVIRONMENT, named)
            interface: EnvironmentInterface = await call.result()
        except BaseException:
            if call is None or (call.finished.is_set() and not made):
                self.alive -= 1
            else:
                self._given_up += 1
                _spawn(self._closed_when_made(call, made, named, name_of(factory)), self._ends)
            raise
        instance = Instance(name, made[0](), interface, self._code)
        if not self._interfaces.setdefault(name, interface).has(interface):
            text = f"it gave a {interface.cls} with other methods than before; give instances of one class"
            self._discard(instance)
            raise UserCodeError(text, "TypeError", defined_at(named))
        return instance

    async def _closed_when_made(self, call: Call, made: list[Holder], named: Factory, name: str) -> None:
        """Close an environment whose caller has gone, or that failed, if it is made after all.

        A constructor in a thread cannot be stopped: it may return long after its time-out.
        """
        await call.finished.wait()
        self._given_up -= 1
        if made:
            await self._ended(name, named, made[0])
        else:
            self.alive -= 1

    async def _settled(self, instance: Instance) -> None:
        """Give back an instance that a call still uses. The call was cancelled with its episode.

        If the call does not end in time, the instance is lost.
        """
        if not await instance.until_free(max(GRACE_S, self._timeout_s)):
            instance.lost = True
        self.give_back(instance)

    def _discard(self, instance: Instance) -> None:
        interface = instance.interface
        named = interface.methods.get("close", _close)
        _spawn(self._ended(interface.cls, named, instance.emptied()), self._ends)

    async def _ended(self, cls: str, named: Callable[..., Any], holder: Holder) -> None:
        """Close an object and release it where user code runs. A failure is reported to `notify`.

        Args:
            cls: Name of the class, for the report.
            named: The user's function that errors name.
            holder: Holds the object.
        """
        try:
            call = self._code.begin(_close, _none, self._timeout_s, Kind.CLOSE, named, holder=holder)
            await call.result()
        except UserCodeError as error:
            self._notify(f"close {cls} {error.kind}", f"{cls}.close failed: {error}", error.where)
        finally:
            self.alive -= 1


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _close(holder: Holder) -> Any:
    """Take an object out of its holder, and close it if it has a `close`. It runs where user code runs."""
    made = holder()
    return made.close() if "close" in interface_of(made).methods else None


def _none(result: Any) -> None:
    """Ignore the value that a close returned."""
