"""Follows a call of user code to its actual end, which may be long after its time-out.

Invariant: `Followed.back` is set only when the call is not running and never will be.

A thread cannot be stopped, so a call that was given up may still use an object. The owner of the object must know when
it is free.
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
    """Follows one call of `run`. Pass `function` to `UserCode.call`.

    Call `let_go` when nobody waits for the call any more. A call that has not started by then never does.

    Args:
        run: The call to follow.
        named: The user's function behind `run`, named in errors. It is async if `run` returns an awaitable.
        came: Called with the result where the call ran, before `back` is set, even if nobody waits for the result.

    Attributes:
        function: The function to pass to `UserCode.call`.
        began: True if the call was ever started.
        back: Set, on the event loop that made this object, when the call is not running and never will be.
    """

    def __init__(
        self, run: Callable[..., Any], named: Callable[..., Any], came: Callable[[Any], None] = lambda gave: None
    ) -> None:
        self.back = asyncio.Event()
        self.began = False
        self._run = run
        self._came = came
        self._loop = asyncio.get_running_loop()
        # Either the call takes this entry when it starts, or `let_go` does. Only one of them can.
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
        """Mark the call as started. It runs where user code runs.

        Raises:
            IndexError: `let_go` was called before.
        """
        self._only.pop()
        self.began = True

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
            self._loop.call_soon_threadsafe(self.back.set)


class _Followed(Awaited):
    """Follows the awaitable that a call returned.

    Args:
        result: The awaitable or async generator.
        came: Called with the final result.
        tell: Called when the awaitable has ended, or was closed without being awaited.
    """

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
