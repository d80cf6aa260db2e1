"""Calling the user's functions: sync ones in a thread, async ones on the loop, each with a time-out.

Every call gets a daemon thread of its own rather than one of a pool, so that a function that never returns neither
takes a slot from others nor keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any


class UserCodeError(Exception):
    """The user's function failed, or did not answer in time; the text says how."""


async def call(function: Callable[..., Any], timeout_s: float, /, **arguments: Any) -> Any:
    """What `function(**arguments)` returns. Raises `UserCodeError` if it raises anything, or is not done in time."""
    task = asyncio.ensure_future(_run(function, arguments))
    try:
        # Not asyncio.timeout: it would wait for a coroutine that swallows its cancellation.
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise UserCodeError(f"no answer within {timeout_s:g} s")
    if task.cancelled():
        raise UserCodeError("it cancelled itself")
    error = task.exception()
    if error is not None:
        raise UserCodeError(f"{type(error).__name__}: {error}") from error
    return task.result()


async def in_thread(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """What `function(**arguments)` returns or raises, run in a thread. If cancelled, the thread goes on alone."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    name = getattr(function, "__name__", type(function).__name__)

    def body() -> None:
        result, error = None, None
        try:
            result = function(**arguments)
        except BaseException as caught:
            error = _as_exception(caught)
        with contextlib.suppress(RuntimeError):  # the loop may be gone by now
            loop.call_soon_threadsafe(_settle, future, result, error)

    threading.Thread(target=body, daemon=True, name=f"user:{name}").start()
    return await future


async def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        result = await in_thread(function, **arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise _as_exception(error) from error


def _as_exception(error: BaseException) -> Exception:
    """`error` as one that a task may hold: asyncio lets SystemExit and the like end the whole loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}({error})")


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
