"""One environment in the making, which is closed also where nobody waits for it any more.

A constructor in a thread cannot be stopped: it may come back long after its time-out, or after its episode has gone,
and what it made must be closed all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeAlias

from rollout_worker.task.environment.face import Face, face_of
from rollout_worker.task.environment.instance import Holder
from rollout_worker.user_code import Followed, Kind, UserCode, defined_at
from rollout_worker.user_code.errors import name_of

Factory: TypeAlias = Callable[..., Any]


class Making:
    """One call of `factory`. unwanted(self, holder): gets, on the event loop that made this, what is made after all
    when its caller has gone, to be closed by `closing`; name, where: of the factory, file:line."""

    def __init__(self, factory: Factory, unwanted: Callable[[Making, Holder], None]) -> None:
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

    async def made(self, code: UserCode, timeout_s: float) -> tuple[Any, Face]:
        """What the factory gives, and what that can do. Raises `UserCodeError`."""
        faces: list[Face] = []

        def plain(found: Any) -> None:
            faces.append(face_of(found))

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
            return made.close() if "close" in face_of(made).methods else None

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
