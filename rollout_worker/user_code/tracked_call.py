"""A call of user code that is followed to its true end, which may be long after its time-out.

A thread cannot be stopped: a call that was given up may still be at work on an object. Whoever hands that object out
has to know when it is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

from rollout_worker.user_code.async_code import Awaited, close_unawaited, collected
from rollout_worker.user_code.errors import is_async


class Followed:
    """One call of `run`, to be handed to `UserCode.call` as `self.function`. `named`: the user's own function behind
    it, for the errors, and async where `run` gives what must be awaited. `began`: whether it was ever called; `back`:
    set, on the event loop that made this, when it is not at work, nor ever will be. `came` gets what it gave, where it
    ran and before `back` is set, also where nobody waits for that. Call `let_go` when nobody waits for it any longer: a
    call that has not begun by then never does."""

    def __init__(
        self, run: Callable[..., Any], named: Callable[..., Any], came: Callable[[Any], None] = lambda gave: None
    ) -> None:
        self.back = asyncio.Event()
        self.began = False
        self._run = run
        self._came = came
        self._loop = asyncio.get_running_loop()
        # Taken by the call that begins, or by `let_go`.
        self._only: list[None] = [None]
        self.function = self._asynchronous(named) if is_async(named) else self._synchronous(named)

    def let_go(self) -> None:
        with contextlib.suppress(IndexError):
            self._only.pop()
            self.back.set()

    def _synchronous(self, named: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(named)
        def followed(**arguments: Any) -> Any:
            self._begin()
            waits = False
            try:
                result = self._run(**arguments)
                waits = inspect.isawaitable(result) or inspect.isasyncgen(result)
                if waits:
                    return _Followed(result, self._came, self._tell)
                self._came(result)
                return result
            finally:
                if not waits:
                    self._tell()

        return followed

    def _asynchronous(self, named: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(named)
        async def followed(**arguments: Any) -> Any:
            self._begin()
            try:
                result = await _final(self._run(**arguments))
                self._came(result)
                return result
            finally:
                self._tell()

        return followed

    def _begin(self) -> None:
        """Where user code runs. Raises `IndexError` where it was let go before."""
        self._only.pop()
        self.began = True

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be gone by now
            self._loop.call_soon_threadsafe(self.back.set)


class _Followed(Awaited):
    """What a call gave that has to be awaited. `came` gets what that gives; `tell` is called when it has ended."""

    def __init__(self, result: Any, came: Callable[[Any], None], tell: Callable[[], None]) -> None:
        self._result = result
        self._came = came
        self._tell = tell

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            result = yield from _final(self._result).__await__()
            self._came(result)
            return result
        finally:
            self._tell()

    def close(self) -> None:
        close_unawaited(self._result)
        self._tell()


async def _final(result: Any) -> Any:
    if inspect.isasyncgen(result):
        return await collected(result)
    while inspect.isawaitable(result):
        result = await result
    return result
