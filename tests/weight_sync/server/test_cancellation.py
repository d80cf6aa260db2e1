"""Awaiting to the end, on threads, and several at once."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from slipstream.weight_sync.server import cancellation
from slipstream.weight_sync.server.cancellation import gather, on_thread, shielded


async def test_what_must_not_be_cut_short_runs_on_through_cancellations() -> None:
    go_on, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        ended.set()

    task = asyncio.create_task(shielded(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_thread_gives_its_result_or_its_error() -> None:
    assert await on_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await on_thread(divmod, 7, 0)


async def test_a_cancellation_waits_for_a_thread_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "GRACE_S", 0.05)
    began, release = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        release.wait(10)

    task = asyncio.create_task(on_thread(hang))
    assert await asyncio.to_thread(began.wait, 5)
    cancelled = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - cancelled < 3
    release.set()


@pytest.mark.parametrize("grace_s", [0.05, 10.0], ids=["too late", "in time"])
async def test_a_result_that_a_cancelled_caller_does_not_get_is_discarded(
    monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    monkeypatch.setattr(cancellation, "GRACE_S", grace_s)
    began, release = threading.Event(), threading.Event()
    discarded: asyncio.Queue[str] = asyncio.Queue()

    def open_late() -> str:
        began.set()
        release.wait(10)
        return "open"

    task = asyncio.create_task(on_thread(open_late, discard=discarded.put_nowait))
    assert await asyncio.to_thread(began.wait, 5)
    task.cancel()
    await asyncio.sleep(0.2)
    assert task.done() == (grace_s < 1)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        assert await discarded.get() == "open"


async def test_the_first_error_of_several_cancels_the_rest_and_comes_bare() -> None:
    waiting = asyncio.Event()
    cancelled: list[str] = []

    async def wait() -> int:
        waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("wait")
            raise
        return 1

    async def fail() -> int:
        await waiting.wait()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await gather(wait(), fail())
    assert cancelled == ["wait"]


async def test_results_come_in_the_order_of_the_work() -> None:
    async def give(value: int) -> int:
        for _ in range(3 - value):
            await asyncio.sleep(0)
        return value

    assert await gather(give(1), give(2), give(3)) == [1, 2, 3]
    assert await gather() == []
