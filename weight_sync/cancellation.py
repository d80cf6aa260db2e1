"""Awaiting what cancellation must not cut short, and what must not hold up the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# What a thread that is at work gets to end by itself when its caller is cancelled.
GRACE_S = 2.0


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, though this task be cancelled meanwhile; a cancellation is raised after it has ended."""
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


async def on_thread(work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)` on a daemon thread of its own.

    A transfer that hangs thus takes no place in the loop's pool of threads from other servers' transfers, and the
    end of the process does not wait for it, as it would with `asyncio.to_thread`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if done.done():
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=run, name=f"weight-sync {getattr(work, '__name__', 'work')}", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done], timeout=GRACE_S)
        if done.done() and not done.cancelled():
            done.exception()  # retrieved: the cancellation is what counts
        else:
            done.cancel()
        raise
