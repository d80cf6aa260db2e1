"""How many episodes continue in one round of the event loop."""

from __future__ import annotations

import asyncio

from slipstream.rollout_worker.episodes.capacity import LoopYield


async def rounds_of(loop_yield: LoopYield, tasks: int) -> list[int]:
    """The round of the loop in which each of `tasks`, all ready at once, came through."""
    now = 0
    through: list[int] = []

    async def one() -> None:
        await loop_yield.passed()
        through.append(now)

    running = [asyncio.ensure_future(one()) for _ in range(tasks)]
    while not all(task.done() for task in running):
        await asyncio.sleep(0)
        now += 1
    return through


async def test_i9_episodes_that_are_ready_at_once_do_not_hold_the_loop() -> None:
    through = await rounds_of(LoopYield(per_round=4), 50)
    assert len(through) == 50
    assert through == sorted(through)
    assert max(through.count(number) for number in set(through)) == 4


async def test_whoever_is_alone_passes_at_once() -> None:
    loop_yield = LoopYield(per_round=1)
    for _ in range(5):
        passing = loop_yield.passed()
        try:
            passing.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        for _ in range(3):
            await asyncio.sleep(0)


async def test_one_that_is_cancelled_takes_nobody_s_place() -> None:
    loop_yield = LoopYield(per_round=1)
    await loop_yield.passed()
    first, cancelled, last = (asyncio.ensure_future(loop_yield.passed()) for _ in range(3))
    await asyncio.sleep(0)
    cancelled.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(first, last)
    assert cancelled.cancelled()


async def test_it_comes_to_rest() -> None:
    """Or an idle worker would spin."""
    loop_yield = LoopYield()
    await loop_yield.passed()
    for _ in range(4):
        await asyncio.sleep(0)
    assert not loop_yield._turning
