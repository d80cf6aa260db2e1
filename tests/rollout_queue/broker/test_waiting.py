"""The line for tickets: first come, first served, and as many are woken as there are permits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.protocol import reasons
from slipstream.protocol.messages import FinishRun, Server, ServerChange, ServerState, TicketFailure, TicketRequest
from slipstream.rollout_queue.broker import learner, workers
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.waiting import MAX_POLLS, Place, TicketLine
from slipstream.rollout_queue.ledger.records import Refusal
from tests.kit.broker import URL, running, stays
from tests.kit.messages import SERVER


class Line(RuleBasedStateMachine):
    """Requests come, take, give up; permits come. Nobody waits next to a permit that nobody was called for."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = 0
        self.line = TicketLine(lambda: self.permits)
        self.waiting: list[Place] = []

    @rule()
    def comes(self) -> None:
        place = self.line.place("w", (), stays)
        if self.permits > self.line.spoken_for:
            self.permits -= 1
            return
        self.line.stand(place)
        self.waiting.append(place)

    @rule(count=st.integers(1, 3))
    def permits_come(self, count: int) -> None:
        self.permits += count
        self.line.call_next()

    @rule()
    def permits_go(self) -> None:
        """A server fell behind: what was free is not any more."""
        self.permits = 0

    def called(self) -> list[Place]:
        return [place for place in self.waiting if place.is_called]

    @precondition(lambda self: self.called())
    @rule(data=st.data(), leaves=st.booleans())
    def called_one_takes_or_leaves(self, data: st.DataObject, leaves: bool) -> None:
        place = data.draw(st.sampled_from(self.called()))
        if not leaves and not self.permits:
            self.line.stand(place)  # keeps its place
            return
        self.permits -= not leaves
        self.waiting.remove(place)
        self.line.leave(place)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def one_gives_up(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(place)
        self.line.leave(place)

    @invariant()
    def no_permit_is_left_that_nobody_was_called_for(self) -> None:
        assert len(self.called()) == self.line.spoken_for
        assert self.line.spoken_for >= min(self.permits, len(self.waiting))


TestLine = Line.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_first_are_called_and_no_more_than_there_are_permits() -> None:
    permits = [0]
    line = TicketLine(lambda: permits[0])
    places = [line.place(f"w{number}", (), stays) for number in range(1000)]
    for place in places:
        line.stand(place)
    permits[0] = 3
    for _ in range(5):
        line.call_next()
    assert [place for place in places if place.is_called] == places[:3]


async def polling(broker: Broker, count: int) -> list[asyncio.Task[Any]]:
    tasks, before = [], len(broker.line)
    for number in range(count):
        request = TicketRequest(f"w{number}", 1, wait_s=30.0)
        tasks.append(asyncio.create_task(workers.draw_tickets(broker, request, stays)))
        await taken(tasks)
        assert len(broker.line) == before + number + 1
    return tasks


async def taken(tasks: list[asyncio.Task[Any]]) -> list[int]:
    for _ in range(20):
        await asyncio.sleep(0)
    return [number for number, task in enumerate(tasks) if task.done()]


async def full(broker: Broker) -> list[str]:
    """Draw all tickets that admission grants."""
    reply = await workers.draw_tickets(broker, TicketRequest("first", 1000, wait_s=0.0), stays)
    assert reply is not None
    return [ticket.id for ticket in reply.tickets]


async def test_permits_go_to_those_who_have_waited_longest() -> None:
    async with running() as broker:
        held = await full(broker)
        tasks = await polling(broker, 5)
        for count, ticket_id in enumerate(held[:3]):
            await workers.fail_ticket(broker, ticket_id, TicketFailure("first", "test"))
            assert await taken(tasks) == list(range(count + 1))
        broker.close_waits()
        await asyncio.gather(*tasks)


async def test_who_comes_last_does_not_take_the_permit_of_one_who_was_called() -> None:
    async with running() as broker:
        held = await full(broker)
        tasks = await polling(broker, 2)
        freeing = asyncio.create_task(workers.fail_ticket(broker, held[0], TicketFailure("first", "test")))
        late = asyncio.create_task(workers.draw_tickets(broker, TicketRequest("late", 1, wait_s=30.0), stays))
        assert await taken([*tasks, late]) == [0]
        broker.close_waits()
        await asyncio.gather(freeing, late, *tasks)


async def test_the_turn_of_one_that_hung_up_passes_to_the_next() -> None:
    async with running() as broker:
        held = await full(broker)

        async def gone() -> bool:
            return True

        first = asyncio.create_task(workers.draw_tickets(broker, TicketRequest("gone", 1, wait_s=30.0), gone))
        await taken([first])
        tasks = await polling(broker, 1)
        await workers.fail_ticket(broker, held[0], TicketFailure("first", "test"))
        assert await taken([first, *tasks]) == [0, 1]
        assert first.result() is None
        assert len(tasks[0].result().tickets) == 1


async def test_a_server_that_leaves_service_wakes_those_who_use_it_and_no_others() -> None:
    async with running() as broker:
        await full(broker)
        uses = asyncio.create_task(
            workers.draw_tickets(broker, TicketRequest("uses", 1, wait_s=30.0, serving=[SERVER]), stays)
        )
        other = asyncio.create_task(workers.draw_tickets(broker, TicketRequest("other", 1, wait_s=30.0), stays))
        assert await taken([uses, other]) == []
        await learner.put_server(broker, ServerChange(Server(SERVER, URL, ServerState.DOWN), 1))
        assert await taken([uses, other]) == [0]
        assert [server.state for server in uses.result().servers] == [ServerState.DOWN]
        broker.close_waits()
        await other


async def test_the_end_of_the_run_reaches_all_who_wait() -> None:
    async with running() as broker:
        await full(broker)
        tasks = await polling(broker, 3)
        await learner.finish(broker, FinishRun(1))
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, Refusal)
            assert ended.reason == reasons.RUN_FINISHED


async def test_polls_in_one_workers_name_are_bounded_so_that_others_get_their_turn() -> None:
    """Nine thousand of them took the fleet's permits."""
    async with running(learner={"groups_per_step": 16}) as broker:
        held = await full(broker)
        request = TicketRequest("many", 1, wait_s=30.0)
        many = [asyncio.create_task(workers.draw_tickets(broker, request, stays)) for _ in range(1000)]
        await taken(many)
        other = await polling(broker, 1)
        refused = [task.exception() for task in many if task.done()]
        assert len(refused) == 1000 - MAX_POLLS
        assert {error.reason for error in refused if isinstance(error, Refusal)} == {reasons.BUSY}
        assert "worker many asks for tickets 8 times at once" in str(refused[0])
        for ticket_id in held[: MAX_POLLS + 1]:
            await workers.fail_ticket(broker, ticket_id, TicketFailure("first", "test"))
        assert await taken(other) == [0]
        assert not broker.line.polls
        again = asyncio.create_task(workers.draw_tickets(broker, request, stays))
        assert await taken([again]) == []
        broker.close_waits()
        await again


async def test_polls_whose_connections_broke_do_not_keep_their_worker_from_asking() -> None:
    """They stood for as long as they had asked to wait, a minute, and it was refused."""
    async with running(learner={"groups_per_step": 16}) as broker:
        held = await full(broker)
        broke = asyncio.Event()

        async def has_left() -> bool:
            return broke.is_set()

        request = TicketRequest("w", 1, wait_s=30.0)
        gone = [asyncio.create_task(workers.draw_tickets(broker, request, has_left)) for _ in range(MAX_POLLS)]
        assert await taken(gone) == []
        with pytest.raises(Refusal, match="asks for tickets 8 times at once"):
            await workers.draw_tickets(broker, request, stays)
        broke.set()
        again = asyncio.create_task(workers.draw_tickets(broker, request, stays))
        async with asyncio.timeout(10):
            assert await asyncio.gather(*gone) == [None] * MAX_POLLS
        await workers.fail_ticket(broker, held[0], TicketFailure("first", "test"))
        assert await taken([again]) == [0]
        assert not broker.line.polls


@pytest.mark.parametrize("waiting", [2, 200])
async def test_a_permit_wakes_one_however_many_wait(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost by count, not by time: how often anyone looks whether tickets can be issued."""
    async with running() as broker:
        held = await full(broker)
        tasks = await polling(broker, waiting)
        looks = 0
        look = workers._issue

        def counted(*arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            return look(*arguments)

        monkeypatch.setattr(workers, "_issue", counted)
        await workers.fail_ticket(broker, held[0], TicketFailure("first", "test"))
        assert await taken(tasks) == [0]
        assert looks == 1
        broker.close_waits()
        await asyncio.gather(*tasks)
