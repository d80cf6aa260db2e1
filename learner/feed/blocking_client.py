"""The queue client for callers that are not async: it runs on its own event loop, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from slipstream.protocol.client import QueueClient

T = TypeVar("T")

# A shorter wait is not worth two requests.
REPORT_WAIT_AFTER_S = 1.0

# The queue gives a loading learner up if it hears nothing for vllm.start_timeout_s, 600 s by default.
REPORT_WAIT_AGAIN_S = 60.0


class BlockingQueueClient:
    """Owns the thread, the loop and `queue`, the client on it. A context manager: leaving it cancels what runs on the
    loop."""

    def __init__(self, queue: QueueClient) -> None:
        self.queue = queue
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="queue-client", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self.queue.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._wait(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, request: Callable[[QueueClient], Awaitable[T]]) -> T:
        """Run `request` on the client's loop and waits for it; its exceptions are raised here."""

        async def answer() -> T:
            return await request(self.queue)

        return self._wait(answer())

    @contextmanager
    def waiting(self, session: int, what: str) -> Iterator[None]:
        """Wrap a wait of the learner: if it lasts, the status page says what for (I7)."""
        over = asyncio.Event()
        report = asyncio.run_coroutine_threadsafe(self._report_wait(session, what, over), self.loop)
        try:
            yield
        finally:
            self.loop.call_soon_threadsafe(over.set)
        report.result()

    async def _report_wait(self, session: int, what: str, over: asyncio.Event) -> None:
        if await _within(REPORT_WAIT_AFTER_S, over):
            return
        await self.queue.waiting(session, what)
        while not await _within(REPORT_WAIT_AGAIN_S, over):
            await self.queue.waiting(session, what)
        await self.queue.waiting(session, None)

    async def _close(self) -> None:
        """Cancel calls that a signal may have left behind, and close the client."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.queue.__aexit__(None, None, None)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        answer = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return answer.result()
        except BaseException:
            answer.cancel()  # a signal may have ended the wait, which would leave the call hanging
            raise


async def _within(seconds: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
