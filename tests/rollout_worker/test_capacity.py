import asyncio

import pytest

from rollout_worker.capacity import Capacity


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_waiting_counts_only_idle_slots_and_only_while_tickets_are_asked_for():
    clock = Clock()
    capacity = Capacity(8, 8, clock)
    clock.now = 10.0
    assert capacity.waited_s == 0.0
    with capacity.asking():
        clock.now = 12.0
        reservation = capacity.begin(6)
        clock.now = 16.0
        reservation.give(2)
        clock.now = 18.0
    clock.now = 30.0
    assert capacity.waited_s == pytest.approx(2.0 * 8 / 8 + 4.0 * 2 / 8 + 2.0 * 4 / 8)
    assert (capacity.generating, capacity.open) == (4, 6)


async def test_f8_a_ticket_is_asked_for_when_enough_slots_are_free():
    capacity = Capacity(4, 100, Clock())
    reservation = capacity.begin(4)
    waiter = asyncio.create_task(capacity.wait_for_room(3))
    for _ in range(2):
        await asyncio.sleep(0)
        reservation.give()
    await asyncio.sleep(0)
    assert not waiter.done()
    reservation.give()
    await asyncio.wait_for(waiter, 1)


async def test_episodes_that_wait_for_something_else_hold_no_slot_but_are_open():
    capacity = Capacity(4, 8, Clock())
    first = capacity.begin(4)
    assert capacity.room(4) == 0
    first.give_all()
    assert capacity.room(4) == 1
    second = capacity.begin(4)
    second.give_all()
    assert capacity.room(4) == 0, "8 are open"
    capacity.end(4, first)
    assert capacity.room(4) == 1


async def test_a_begun_episodes_turn_comes_before_a_first_one_and_both_before_a_ticket():
    capacity = Capacity(1, 8, Clock())
    reservation = capacity.begin(1)
    order = []

    async def turn(name, begun):
        async with capacity.turn(begun):
            order.append(name)

    turns = [asyncio.create_task(turn("new", False)), asyncio.create_task(turn("begun", True))]
    await asyncio.sleep(0)
    reservation.give()
    assert capacity.room(1) == 0
    await asyncio.gather(*turns)
    assert order == ["begun", "new"]
    assert capacity.room(1) == 1


async def test_f15_a_turn_that_is_cancelled_as_it_gets_its_slot_gives_it_back():
    capacity = Capacity(1, 8, Clock())
    reservation = capacity.begin(1)

    async def turn():
        async with capacity.turn():
            pass

    waiting = asyncio.create_task(turn())
    await asyncio.sleep(0)
    reservation.give()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert capacity.free == 1


def test_a_group_larger_than_all_slots_begins_when_it_is_alone():
    capacity = Capacity(4, 4, Clock())
    assert capacity.room(9) == 1
    small = capacity.begin(1)
    assert capacity.room(9) == 0
    capacity.end(1, small)
    large = capacity.begin(9)
    assert capacity.free == 0
    capacity.end(9, large)
    assert capacity.free == 4
