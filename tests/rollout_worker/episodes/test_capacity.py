"""Slots for what generates, room for what is open, and how much of the slots was idle."""

import asyncio
import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.rollout_worker.episodes.capacity import Capacity


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def capacity_of(total, max_open, clock=None):
    """One whose groups succeed."""
    capacity = Capacity(total, max_open, clock or Clock())
    capacity.cautious = False
    return capacity


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def started(capacity, episodes):
    """A group's reservation, with the first turns begun that may begin at once."""
    reservation = capacity.begin(episodes)
    parts = reservation.parts()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await anext(parts)
    return reservation


async def test_waiting_counts_only_idle_slots_and_only_while_tickets_are_asked_for():
    clock = Clock()
    capacity = capacity_of(8, 8, clock)
    clock.now = 10.0
    assert capacity.waited_s == 0.0
    with capacity.asking():
        clock.now = 12.0
        reservation = await started(capacity, 6)
        clock.now = 16.0
        reservation.give()
        reservation.give()
        clock.now = 18.0
    clock.now = 30.0
    assert capacity.waited_s == pytest.approx(2.0 * 8 / 8 + 4.0 * 2 / 8 + 2.0 * 4 / 8)
    assert (capacity.generating, capacity.open, capacity.full_s) == (4, 6, 0.0)


async def test_i7_slots_that_are_idle_because_enough_is_open_are_told_apart():
    clock = Clock()
    capacity = capacity_of(8, 8, clock)
    reservation = capacity.begin(8)
    waiter = asyncio.create_task(capacity.wait_for_room(2))
    await settle()
    clock.now = 1.0  # all slots are held: nothing is idle
    reservation.give_all()
    clock.now = 3.0  # all are free, and 8 episodes are open
    await settle()
    assert not waiter.done()
    capacity.end(8, reservation)
    await settle()
    clock.now = 9.0
    assert waiter.result() == 4
    assert (capacity.full_s, capacity.waited_s) == (pytest.approx(2.0), 0.0)


async def test_a_ticket_is_asked_for_when_enough_slots_are_free():
    capacity = capacity_of(4, 100)
    reservation = await started(capacity, 4)
    capacity.enough_open = 100
    waiter = asyncio.create_task(capacity.wait_for_room(3))
    for _ in range(2):
        await asyncio.sleep(0)
        reservation.give()
    await asyncio.sleep(0)
    assert not waiter.done()
    reservation.give()
    assert await asyncio.wait_for(waiter, 1) == 1


async def test_no_more_are_open_than_the_slots_hold_until_slots_fall_idle():
    capacity = capacity_of(4, 6)
    first = await started(capacity, 4)
    waiter = asyncio.create_task(capacity.wait_for_room(2))
    await settle()
    first.give()
    await settle()
    assert not waiter.done(), "one slot is idle, and a group needs two"
    first.give()
    assert await waiter == 1, "two are idle, and nothing wants them"
    second = await started(capacity, 2)
    waiter = asyncio.create_task(capacity.wait_for_room(2))
    await settle()
    second.give()
    second.give()
    await settle()
    assert not waiter.done(), "6 are open, the most"
    capacity.end(2, second)
    assert await waiter == 1


async def test_slots_that_were_reserved_and_not_used_open_no_more():
    """As for episodes that are reset first: they come back for their slots, all at once."""
    capacity = capacity_of(4, 100)
    reservation = capacity.begin(4)
    waiter = asyncio.create_task(capacity.wait_for_room(2))
    await settle()
    reservation.give_all()
    await settle()
    assert not waiter.done()
    waiter.cancel()


async def test_a_turn_that_waits_for_its_slot_closes_one_that_idle_slots_had_opened():
    capacity = capacity_of(2, 100)
    capacity.enough_open = 6
    reservation = await started(capacity, 2)
    turns = [asyncio.create_task(held(capacity)) for _ in range(3)]
    await settle()
    assert capacity.enough_open == 3
    for turn in turns:
        turn.cancel()
    capacity.end(2, reservation)


async def test_while_groups_fail_no_more_are_open_than_the_slots_hold():
    capacity = capacity_of(4, 100)
    capacity.enough_open = 50
    capacity.begin(4).give_all()
    assert capacity.room(2) == 2
    capacity.cautious = True
    assert capacity.room(2) == 0


async def held(capacity, begun=True, until=None):
    async with capacity.turn(begun) as waited_s:
        if until is not None:
            await until.wait()
        return waited_s


async def test_a_begun_episodes_turn_comes_before_a_first_one_and_both_before_a_ticket():
    capacity = capacity_of(1, 8)
    reservation = await started(capacity, 1)
    order = []

    async def turn(name, begun):
        async with capacity.turn(begun):
            order.append(name)
            assert capacity.room(1) == 0

    turns = [asyncio.create_task(turn("new", False)), asyncio.create_task(turn("begun", True))]
    await asyncio.sleep(0)
    capacity.end(1, reservation)
    assert capacity.room(1) == 0
    await asyncio.gather(*turns)
    assert order == ["begun", "new"]
    assert capacity.room(1) == 1


async def test_a_begun_turn_passes_by_a_group_that_waits_for_all_its_slots():
    capacity = capacity_of(4, 8)
    first = await started(capacity, 3)
    second = await started(capacity, 2)
    assert (capacity.free, capacity.waiting) == (1, 2)
    assert await held(capacity) == 0.0
    new = asyncio.create_task(held(capacity, begun=False))
    await settle()
    assert not new.done(), "it is behind the group"
    first.give()
    await settle()
    assert (second.wanted, capacity.waiting) == (0, 1), "the group has its two, and the first turn waits"
    second.give_all()
    await new
    assert capacity.free == 2


async def test_the_seconds_that_a_turn_waited_are_told():
    clock = Clock()
    capacity = capacity_of(1, 8, clock)
    reservation = await started(capacity, 1)
    turn = asyncio.create_task(held(capacity))
    await settle()
    clock.now = 3.5
    reservation.give()
    assert await turn == 3.5
    assert await held(capacity) == 0.0


async def test_a_turn_that_is_cancelled_as_it_gets_its_slot_gives_it_back():
    capacity = capacity_of(1, 8)
    reservation = await started(capacity, 1)
    waiting = asyncio.create_task(held(capacity))
    await asyncio.sleep(0)
    reservation.give()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert capacity.free == 1


async def test_a_cancelled_first_turn_makes_way_for_those_behind_it():
    capacity = capacity_of(4, 8)
    first = await started(capacity, 3)
    second = await started(capacity, 2)
    new = asyncio.create_task(held(capacity, begun=False))
    await settle()
    capacity.end(2, second)
    await asyncio.wait_for(new, 1)
    capacity.end(3, first)
    assert (capacity.free, capacity.open) == (4, 0)


async def test_a_group_larger_than_all_slots_begins_in_parts():
    capacity = capacity_of(20, 20)
    assert capacity.room(50) == 1, "it is alone"
    group = capacity.begin(50)
    parts = group.parts()
    assert await anext(parts) == 20
    nexts = []
    for done in (15, 1, 14):
        for _ in range(done):
            group.give()
        nexts.append(capacity.free)
        if done != 15:
            nexts.append(await anext(parts))
    assert nexts == [15, 0, 16, 0, 14], "16 at a time, and the rest"
    assert capacity.generating == 20
    with pytest.raises(StopAsyncIteration):
        await anext(parts)
    capacity.end(50, group)
    assert (capacity.free, capacity.open) == (20, 0)


class Slots(RuleBasedStateMachine):
    """Groups and turns come, wait, are cancelled and end, in any order."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.capacity = capacity_of(20, 60)
        self.groups = []  # [episodes, reservation, task that takes its parts, first turns at work]
        self.turns = []  # [task, event that ends it, begun]
        self.order = []

    def run(self, coroutine=None):
        async def main():
            found = None if coroutine is None else await coroutine
            await settle()
            return found

        return self.loop.run_until_complete(main())

    @rule(episodes=st.integers(1, 50))
    def begin(self, episodes):
        async def begun():
            group = [episodes, self.capacity.begin(episodes), None, 0]

            async def take():
                async for count in group[1].parts():
                    group[3] += count

            group[2] = asyncio.create_task(take())
            self.groups.append(group)

        self.run(begun())

    @rule(begun=st.booleans())
    def ask(self, begun):
        async def asked():
            end = asyncio.Event()
            self.turns.append([None, end, begun, False])
            turn = self.turns[-1]

            async def work():
                async with self.capacity.turn(begun):
                    turn[3] = True
                    try:
                        await end.wait()
                    finally:
                        turn[3] = False

            turn[0] = asyncio.create_task(work())

        self.run(asked())

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), cancel=st.booleans(), settled=st.booleans())
    def end_turn(self, data, cancel, settled):
        turn = self.turns.pop(data.draw(st.integers(0, len(self.turns) - 1)))
        if cancel or not turn[3]:
            if not settled:
                # In the round in which another gives its slot.
                self._give_one(data)
            turn[0].cancel()
        else:
            turn[1].set()
        self.run(asyncio.wait([turn[0]]))

    @precondition(lambda self: any(group[3] for group in self.groups))
    @rule(data=st.data())
    def first_turn_done(self, data):
        self._give_one(data)
        self.run()

    def _give_one(self, data):
        able = [group for group in self.groups if group[3]]
        if able:
            group = data.draw(st.sampled_from(able))
            group[3] -= 1
            group[1].give()

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), end=st.booleans())
    def give_all(self, data, end):
        group = data.draw(st.sampled_from(self.groups))
        if end:
            self.groups.remove(group)
            group[2].cancel()
            self.capacity.end(group[0], group[1])
        else:
            group[1].give_all()
        group[3] = 0
        self.run()

    @invariant()
    def every_slot_is_somebodys(self):
        held = sum(group[3] for group in self.groups) + sum(turn[3] for turn in self.turns)
        assert 0 <= self.capacity.free <= self.capacity.total
        assert self.capacity.generating == held

    @invariant()
    def nobody_waits_for_slots_that_are_there(self):
        waiting = [turn for turn in self.turns if not turn[3]]
        wanted = sum(group[1].wanted for group in self.groups)
        assert self.capacity.waiting == len(waiting) + wanted
        if any(turn[2] for turn in waiting) or (waiting and not wanted):
            assert self.capacity.free == 0, "begun before new"
        elif waiting or wanted:
            assert self.capacity.free < 16, "a part is waited for, no more"
        if waiting or wanted:
            assert self.capacity.room(1) == 0, "and all before a ticket"

    @invariant()
    def as_many_are_open_as_the_tickets_have(self):
        assert self.capacity.open == sum(group[0] for group in self.groups)

    def teardown(self):
        for group in self.groups:
            group[2].cancel()
            self.capacity.end(group[0], group[1])
        for turn in self.turns:
            turn[0].cancel()
        self.run()
        assert (self.capacity.free, self.capacity.open, self.capacity.waiting) == (20, 0, 0)
        self.loop.close()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
