"""Calling the user's functions: sync ones in a thread, async ones on the loop, each with a time-out.

Every call gets a daemon thread of its own rather than one of a pool, so that a function that never returns neither
takes a slot from others nor keeps the process from ending. What a function returns or raises may hold objects of the
user's, whose methods may fail or hang too: it is turned into plain data, and an error into text, in such a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from protocol import reasons


class UserCodeError(Exception):
    """The user's function failed, or did not answer in time; the text says how. `kind`: the type of the error, or
    `reasons.TIMEOUT`; `where`: file:line in the user's file, None if it has none."""

    def __init__(self, text: str, kind: str, where: str | None) -> None:
        super().__init__(text)
        self.kind = kind
        self.where = where


class UserCode:
    """Where user code runs. `threads`: the most sync calls at one time; `hung`: calls that were given up and have not
    come back. Use it as a context manager, on one event loop."""

    def __init__(self, threads: int = 64) -> None:
        self.threads = threads
        self.hung = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def call(
        self, function: Callable[..., Any], plain: Callable[[Any], Any], timeout_s: float, /, **arguments: Any
    ) -> Any:
        """`plain(function(**arguments))`. Raises `UserCodeError` if either raises anything, or it is not done in
        time."""
        task = asyncio.ensure_future(_run(function, plain, arguments))
        try:
            # Not asyncio.timeout: it would wait for a coroutine that swallows its cancellation.
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(_taken_note_of)
        if not task.done():
            raise UserCodeError(f"no answer within {timeout_s:g} s", reasons.TIMEOUT, defined_at(function))
        if task.cancelled():
            raise UserCodeError("it cancelled itself", "CancelledError", defined_at(function))
        return task.result()


def _taken_note_of(task: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more: what it raises is nobody's."""
    if not task.cancelled():
        task.exception()


async def in_thread(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """What `function(**arguments)` returns or raises, run in a thread. If cancelled, the thread goes on alone."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def body() -> None:
        result, error = None, None
        try:
            result = function(**arguments)
        except BaseException as caught:
            error = _as_exception(caught)
        with contextlib.suppress(RuntimeError):  # the loop may be gone by now
            loop.call_soon_threadsafe(_settle, future, result, error)

    threading.Thread(target=body, daemon=True, name="user code").start()
    return await future


def failure_of(error: BaseException, file: str | None, otherwise: str | None = None) -> UserCodeError:
    """`error` as text, raised at the innermost line of the user's `file`; `otherwise`, if it was not raised there."""
    kind = type(error).__name__
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    try:
        text = f"{kind}({error})" if isinstance(error, SystemExit) else f"{kind}: {error}"
    except BaseException as another:
        text = f"{kind}, whose text fails with {type(another).__name__}"
    return UserCodeError(text, kind, f"{file}:{lines[-1]}" if lines else otherwise)


def defined_at(function: Callable[..., Any]) -> str | None:
    """file:line of a function, method, partial or callable object; None of one that is not written in Python."""
    code = _code(function)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


async def _run(function: Callable[..., Any], plain: Callable[[Any], Any], arguments: dict[str, Any]) -> Any:
    """As `call`, without the time-out."""

    def begin() -> Any:
        result = function(**arguments)
        return result if inspect.isawaitable(result) else plain(result)

    if inspect.iscoroutinefunction(function):
        result = _guarded(function, begin)
    else:
        result = await in_thread(_guarded, function=function, step=begin)
    if not inspect.isawaitable(result):
        return result
    try:
        value = await result
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # asyncio lets the latter two end the whole loop
        raise _failure(function, error) from error
    return await in_thread(_guarded, function=function, step=partial(plain, value))


def _guarded(function: Callable[..., Any], step: Callable[[], Any]) -> Any:
    try:
        return step()
    except UserCodeError:
        raise
    except BaseException as error:
        raise _failure(function, error) from error


def _failure(function: Callable[..., Any], error: BaseException) -> UserCodeError:
    code = _code(function)
    return failure_of(error, None if code is None else code.co_filename, defined_at(function))


def _code(function: Callable[..., Any]) -> Any:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


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
