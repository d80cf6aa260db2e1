"""Awaits work that a cancellation must not cut short, work on threads, and several pieces of work at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")

# Seconds for which a cancelled caller waits for its thread to end.
GRACE_S = 2.0


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which ends even if this task is cancelled; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    return task.result()


async def gather(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all `work` at once and return the results. The first error cancels the rest and is raised, not a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def gather_two(first: Coroutine[Any, Any, S], second: Coroutine[Any, Any, T]) -> tuple[S, T]:
    """Run two pieces of work as `gather` does, whose results have different types."""
    try:
        async with asyncio.TaskGroup() as group:
            one, other = group.create_task(first), group.create_task(second)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return one.result(), other.result()


async def on_thread(
    work: Callable[..., T],
    *arguments: Any,
    cancelled: Callable[[], None] | None = None,
    discard: Callable[[T], None] | None = None,
) -> T:
    """Run `work(*arguments)` on its own daemon thread and return its result.

    With `asyncio.to_thread` a transfer that hangs would keep a thread of the loop's pool from the transfers to other
    servers, and the process could not end before it.

    Args:
        cancelled: Called when this task is cancelled, to have `work` end.
        discard: Called on the loop with a result that nobody gets, as this task was cancelled, whenever it comes.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if done.done():
            if discard is not None and error is None:
                discard(result)  # type: ignore[arg-type]
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work(*arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=run, name=f"weight-sync {getattr(work, '__name__', 'work')}", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled()
        try:
            await asyncio.wait([done], timeout=GRACE_S)
        finally:
            # An error is retrieved and forgotten: only the cancellation counts.
            if not done.cancel() and done.exception() is None and discard is not None:
                discard(done.result())
        raise
