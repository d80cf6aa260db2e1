import asyncio

import pytest

from rollout_worker.capacity import Capacity


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_waiting_counts_only_idle_permits_and_only_while_tickets_are_asked_for():
    clock = Clock()
    capacity = Capacity(8, clock)
    clock.now = 10.0
    assert capacity.waited_s == 0.0
    with capacity.asking():
        clock.now = 12.0
        capacity.take(6)
        clock.now = 16.0
        capacity.give(2)
        clock.now = 18.0
    clock.now = 30.0
    assert capacity.waited_s == pytest.approx(2.0 * 8 / 8 + 4.0 * 2 / 8 + 2.0 * 4 / 8)
    assert capacity.in_flight == 4


async def test_f8_a_waiter_wakes_when_enough_permits_come_back():
    capacity = Capacity(4, Clock())
    capacity.take(4)
    waiter = asyncio.create_task(capacity.wait_for(3))
    for _ in range(2):
        await asyncio.sleep(0)
        capacity.give(1)
    await asyncio.sleep(0)
    assert not waiter.done()
    capacity.give(1)
    await asyncio.wait_for(waiter, 1)
