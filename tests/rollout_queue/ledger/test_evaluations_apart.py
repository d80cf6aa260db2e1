"""I1, I3: the training of a run that is evaluated is, to every number, the training of a run that is not.

Two queues go through the same events of training. One of them is evaluated meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.protocol import codec
from slipstream.protocol.messages import (
    BeginSession,
    Checkpointed,
    FinishRun,
    LeaseAck,
    LeaseRequest,
    Server,
    ServerChange,
    ServerState,
    Ticket,
    TicketFailure,
    WorkerReport,
)
from slipstream.protocol.status import EvaluationRequest
from slipstream.rollout_queue.broker import learner, lifecycle, workers
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.ledger.records import LIVE, Refusal
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit import config
from tests.kit.broker import DECLARED, FOUND, draw, stays, submit
from tests.kit.messages import SERVER
from tests.kit.queue import FakeTime

SETTINGS = config(
    queue={"ticket_attempts": 2, "ticket_timeout_s": 60.0, "max_staleness": 1, "depth": 2.0},
    learner={"groups_per_step": 2, "keep_checkpoints": 1},
    eval={"every": 1, "share": 0.5},
    worker={"episodes": 8},
)


class Run:
    """A queue, its worker and its learner."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.store = MemoryStore()
        self.broker = Broker(SETTINGS, self.store, self.time.clock())
        self.out: list[Ticket] = []

    async def serve(self, state: ServerState) -> None:
        version = self.broker.ledger.run.version if state is not ServerState.JOINING else None
        await learner.put_server(self.broker, ServerChange(Server(SERVER, "http://s", state, version), self.session))

    @property
    def session(self) -> int:
        return self.broker.ledger.run.session

    async def begin(self, message: BeginSession) -> None:
        await learner.command(self.broker, message)
        await workers.heartbeat(self.broker, WorkerReport("w", self.ids, capacity=8, fingerprint=FOUND))

    @property
    def ids(self) -> list[str]:
        return [ticket.id for ticket in self.out]

    async def draw(self, count: int) -> list[Ticket]:
        drawn = await draw(self.broker, count)
        self.out += drawn
        return drawn

    async def submit(self, ticket: Ticket) -> bool:
        self.out.remove(ticket)
        return await submit(self.broker, ticket)

    async def fail(self, ticket: Ticket, reason: str, retryable: bool) -> None:
        self.out.remove(ticket)
        await workers.fail_ticket(self.broker, ticket.id, TicketFailure("w", reason, "made up", retryable))

    async def checkpoint(self) -> int | None:
        step = self.broker.ledger.run.step
        return (await learner.command(self.broker, Checkpointed(self.session, step))).checkpoint_step

    async def train(self) -> list[str]:
        run = self.broker.ledger.run
        reply = await learner.lease(self.broker, LeaseRequest(run.session, "l", 2, wait_s=0.0), stays)
        names = [codec.decode(bytes(body), dict)["ticket_id"] for body in reply.groups]
        ack = LeaseAck(run.session, names, step=run.step + 1, version=run.version + 1)
        await learner.acknowledge(self.broker, "l", ack)
        return names

    async def finish(self) -> None:
        await learner.finish(self.broker, FinishRun(self.session))

    def training(self) -> list[Any]:
        """Everything that admission, pruning and the sums of the training are made of."""
        ledger, stored = self.broker.ledger, self.store.load()
        return [
            *(msgspec.structs.replace(of, evaluations=0, id="") for of in (ledger.run, stored.run)),
            *(ledger.issued, ledger.outstanding, ledger.next_index, ledger.first_needed(), ledger.bytes),
            *(list(ledger.tickets(state)) for state in LIVE),
            *(+ledger.counts, ledger.drops, ledger.kept_bytes, ledger.tokens_sampled, ledger.to_reissue),
            *(stored.live, stored.to_reissue, stored.next_index, stored.counts, stored.drops, stored.tokens_sampled),
            *(self.broker.grant(), self.broker.observations.progress.ended, self.broker.early_failures.gave_up),
        ]


async def outcome(call: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await call
    except Refusal as refusal:
        return refusal.reason


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["submit", "fail", "never"]), st.integers(0, 9)),
        st.tuples(st.just("time"), st.sampled_from([1, 61, 2000])),
        st.tuples(st.just("serve"), st.sampled_from(["serving", "quarantined", "down"]).map(ServerState)),
        st.tuples(st.just("resume"), st.integers(0, 2)),
        st.tuples(st.sampled_from(["train", "train", "checkpoint", "evaluate"]), st.just(0)),
    ),
    min_size=4,
    max_size=40,
)


class Twins:
    """One queue that is evaluated and one that is not."""

    def __init__(self) -> None:
        self.one, self.twin = Run(), Run()

    async def both(self, event: Callable[[Run], Coroutine[Any, Any, Any]]) -> None:
        """Let an event happen at both, which must answer alike."""
        here, there = await outcome(event(self.one)), await outcome(event(self.twin))
        assert here == there

    async def draw(self, count: int) -> None:
        drawn = await outcome(self.one.draw(count))
        if isinstance(drawn, str):
            assert drawn == await outcome(self.twin.draw(count))
        elif trained := [ticket.id for ticket in drawn if ticket.kind == "train"]:
            assert [ticket.id for ticket in await self.twin.draw(len(trained))] == trained

    async def end_ticket(self, what: str, ticket: Ticket) -> None:
        holders = [run for run in (self.one, self.twin) if ticket.id in run.ids]
        assert len(holders) == (1 if ticket.kind == "eval" else 2)
        answers = []
        for run in holders:
            its = next(its for its in run.out if its.id == ticket.id)
            call = run.submit(its) if what == "submit" else run.fail(its, "row", retryable=what == "fail")
            answers.append(await outcome(call))
        assert answers == answers[:1] * len(answers)

    async def do(self, what: str, value: Any) -> None:
        state = self.one.broker.ledger.run
        match what:
            case "draw":
                await self.draw(value)
            case "submit" | "fail" | "never":
                if self.one.out:
                    await self.end_ticket(what, self.one.out[value % len(self.one.out)])
            case "time":
                self.one.time.now += value
                self.twin.time.now += value
                await self.both(lambda run: run.broker.expire())
            case "serve":
                await self.both(lambda run: run.serve(ServerState.SYNCING))
                await self.both(lambda run: run.serve(value))
            case "train":
                await self.both(lambda run: run.train())
            case "checkpoint":
                await self.both(lambda run: run.checkpoint())
            case "resume":
                step = max(0, state.step - value)
                message = BeginSession(step, state.version, 99, resume=True, fingerprint=DECLARED)
                await self.both(lambda run: run.begin(message))
            case "evaluate":
                request = EvaluationRequest(state.session, state.step, 0, 3, 2, None, 500.0)
                await outcome(learner.ask_for_evaluation(self.one.broker, request))


async def play(events: Sequence[tuple[str, Any]]) -> bool:
    """Play the events. Returns whether a ticket of an evaluation was ever issued."""
    twins, evaluated = Twins(), False
    async with AsyncExitStack() as stack:
        for run in (twins.one, twins.twin):
            await stack.enter_async_context(lifecycle.running(run.broker))
            await run.begin(BeginSession(0, 0, 99, resume=False, fingerprint=DECLARED))
            for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
                await run.serve(state)
        for what, value in events:
            await twins.do(what, value)
            assert twins.one.training() == twins.twin.training(), what
            evaluated = evaluated or any(ticket.kind == "eval" for ticket in twins.one.out)
        await twins.both(lambda run: run.finish())
        assert twins.one.training() == twins.twin.training()
        assert not any(evaluation.ended is None for evaluation in twins.one.broker.evaluation_views())
    return evaluated


@given(EVENTS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_i1_i3_evaluations_change_no_number_of_the_training(events: list[tuple[str, Any]]) -> None:
    asyncio.run(play(events))


def test_the_events_of_this_test_issue_tickets_of_evaluations() -> None:
    assert asyncio.run(play([("evaluate", 0), ("draw", 4), ("submit", 0), ("fail", 0), ("train", 0), ("time", 61)]))
