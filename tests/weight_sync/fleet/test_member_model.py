"""Walks through what may happen to a server of the fleet, and checks what must hold: I5, I6, and that it continues.

`World` plays the server, the queue (with its own rules) and the learner in simulated time, and answers the calls that
`member_state` decides on. `MUTATIONS` lists wrong tables; the walk finds each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.protocol.engine import EngineState
from slipstream.protocol.messages import Server, ServerState
from slipstream.rollout_queue.ledger.records import Refusal, ServerRecord
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.weight_sync.fleet import member_state as table
from slipstream.weight_sync.fleet.decisions import Lag
from slipstream.weight_sync.fleet.eligibility import Ineligible
from slipstream.weight_sync.fleet.member_state import Decision, Event, MemberState, Tell, Weights
from slipstream.weight_sync.fleet.publications import ServerMetrics

SERVING, QUARANTINED, JOINING = ServerState.SERVING, ServerState.QUARANTINED, ServerState.JOINING
METRICS = ServerMetrics(0.1, 0.01, 0.2, 1e-6)

# What may come of each call, and what may happen at any time.
OUTCOMES = {
    "wait": ["due"],
    "look": ["answered", "silent", "hopeless", "ineligible"],
    "generate": ["token", "no token"],
    "publish": ["opens", "no room"],
    "running publish": ["proven", "late", "wrong", "failed", "unasked", "lost", "half loaded", "given up"],
    "running publish, and it restarted": ["failed", "lost", "given up"],
    "running prove": ["proven", "wrong", "unasked"],
    "running prove, and it restarted": ["unasked"],
    "left": [],
}
ALWAYS = ["newer", "restarts", "stops", "goes on", "queue goes", "rejoins", "drains", "behind", "watched", "leaves"]
CHOICES = sorted({*ALWAYS, *(choice for of in OUTCOMES.values() for choice in of)})

Decide = Callable[[MemberState, Event], Decision]


class QueueDown(Exception):
    """The queue did not answer."""


@dataclass
class World:
    """One server, its queue and its learner. All fields are values, so that a copy is another world.

    Attributes:
        record: The queue's.
        proof: Boot and version of the newest proof that held, None since something ended it.
        running: What is published or proven just now.
        undecided: Boot and label that were swapped in without a verdict.
        mute: Whether it could not generate, and has not generated a token since.
        unheard: Whether the queue has not heard of a failed proof.
    """

    decide: Decide
    member: MemberState
    record: ServerRecord
    now: float = 0.0
    newest: int = 1
    boot: int = 1
    label: str = ""
    stuck: bool = False
    mute: bool = False
    seen_stuck: bool = False
    proof: tuple[int, int] | None = None
    undecided: tuple[int, str] | None = None
    served: tuple[int, int] = (0, 0)
    running: Weights | None = None
    begun_on: int = 1
    looked_at: int | None = None
    watching: bool = False
    queue_down: bool = False
    unheard: bool = False
    left: bool = False

    @classmethod
    def began(cls, decide: Decide = table.decide) -> World:
        server = Server("a", "http://a")
        world = cls(decide, MemberState(server), ServerRecord(server))
        world.feed(table.Wanted(0.0, world.newest_weights))
        world.feed(table.Due(0.0))
        return world

    @property
    def newest_weights(self) -> Weights:
        return Weights(self.newest, f"run:{self.newest}")

    @property
    def queue(self) -> Server:
        return self.record.server

    @property
    def choices(self) -> list[str]:
        call = self.member.call if self.running is None else f"running {self.member.call}"
        cut = self.running is not None and self.begun_on != self.boot
        return [*OUTCOMES[f"{call}, and it restarted" if cut else call], *ALWAYS]

    def key(self) -> Any:
        """What tells this world from another: times count from now."""
        process, since = self.member.process, self.member.silent_since
        times = (process.next_try > self.now, process.behind_since is None, since is not None and self.now - since > 10)
        state = replace(
            self.member,
            process=replace(process, next_try=0.0, behind_since=None, failures=min(process.failures, 1)),
            silent_since=None,
            waits_for=None,
            server=replace(self.member.server, reason=None),
        )
        rest = {**vars(self), "now": 0, "member": 0, "record": self.record.server}
        return repr((times, state, sorted(rest.items())))

    # The shell: `member.Member` does the same with real calls.

    def feed(self, event: Event) -> None:
        """Give an event to the member, and do what it decides."""
        call, before = self.member.call, self.queue
        ends = isinstance(event, table.Due) or (type(event) in ENDS and not self.watching)
        self.member, actions = self.decide(self.member, event)
        if self.left:
            assert self.member.call == "left", "a member that left continues"
            assert not actions, "a member that left acts"
        elif not ends and not isinstance(event, table.Left):
            assert self.member.call == call, "an event in the middle of a call began another one"
        if ends:
            self.running = self.member.process.attempt if self.member.call == "prove" else None
            self.begun_on = self.boot
        for action in actions:
            try:
                if isinstance(action, Tell):
                    self.tell(action)
            except Refusal as refusal:
                if action.must:
                    self.mute = self.seen_stuck = False  # it is another process to the learner
                    self.feed(table.Refused(self.now, str(refusal)))
                    return
            except QueueDown:
                self.queue_down = False
                if ends or self.watching or isinstance(event, table.Opened):  # the member's own task begins again
                    if self.watching:
                        self.swap()  # what runs is ended, in its worst moment
                    self.watching = False
                    self.feed(table.Due(self.now))
                return
        if not isinstance(event, table.Told):
            self.check(event, before)

    def tell(self, tell: Tell) -> None:
        if self.queue_down:
            raise QueueDown
        if tell.state is SERVING:
            assert tell.version is not None
            assert self.proof == (self.boot, tell.version), "it serves without a proof on this process"
            assert self.label == f"run:{tell.version}", "it serves what it does not hold"
            assert self.served <= self.proof, "the version that serves went back"
            known = self.queue.state in (SERVING, ServerState.SYNCING, ServerState.DRAINING)
            assert known, "the queue would refuse it"
            self.served = self.proof
        wanted = Server("a", "http://a", tell.state, tell.version, tell.reason)
        registry = ServerRegistry([self.record])
        record = registry.decide(wanted, self.now, 0)
        if record is not None:
            self.record = record
        if tell.state is QUARANTINED:
            self.unheard = False
        if tell.state is JOINING:
            self.undecided = None  # the queue distrusts what was open
        self.feed(table.Told(self.now, tell.state, self.queue))

    def check(self, event: Event, before: Server) -> None:
        call, process = self.member.call, self.member.process
        assert 0 <= self.member.pause_s(self.now) <= table.LOOK_EVERY_S, "it waits without an end"
        assert not self.unheard or call == "left", "a failed proof was not told to the queue before the next call"
        if call == "publish":
            assert self.undecided is None or self.undecided[0] != self.boot, "published before an open proof was asked"
            assert not self.seen_stuck or self.running is not None, "published to a server that generates nothing"
            assert self.member.ineligible is None, "published to a server that the run may not use"
        if isinstance(event, table.Answered) and call != "prove" and self.running is None:
            if self.proof is None or self.proof[0] != self.boot:
                assert process.version is None or process.boot is None, "a restart is not noticed"
                assert self.queue.state is not SERVING, "a server serves that restarted, or was never proven"
            assert event.ineligible is None or self.queue.state is not SERVING, "it serves and may not be used"
        if self.queue.state is SERVING and (
            self.queue != before or (isinstance(event, table.Answered) and call == "wait")
        ):
            assert not self.seen_stuck, "it serves and generates nothing"
            assert not self.mute or self.queue == before, "it serves before it generated a token"
        if isinstance(event, table.Disproven):
            assert self.queue.state in (QUARANTINED, ServerState.DRAINING), "a failed proof does not quarantine"
        if isinstance(event, table.Proven) and event.late and before.state is not SERVING:
            assert self.queue.state is not SERVING, "a version that is old by now serves"

    def swap(self, verdict: bool = False) -> None:
        """Exchange the weights, as far as a publication runs."""
        if self.running is not None and self.begun_on == self.boot:
            self.label = self.running.label
            self.undecided = None if verdict else (self.boot, self.label)

    # What happens.

    def do(self, choice: str) -> None:
        if choice in self.choices:
            getattr(self, choice.replace(" ", "_"))()

    def opens(self) -> None:
        self.running, self.begun_on = self.newest_weights, self.boot
        self.feed(table.Opened(self.now, self.running))

    def due(self) -> None:
        self.now += self.member.pause_s(self.now)
        self.feed(table.Due(self.now))

    def engine(self) -> EngineState:
        stuck = "no step" if self.stuck else None
        return EngineState(f"boot-{self.boot}", self.label, False, True, True, "none", 1, "gloo", stuck=stuck)

    def answered(self) -> None:
        if self.looked_at not in (None, self.boot):
            self.proof, self.mute, self.seen_stuck = None, False, False
        else:
            self.seen_stuck, self.mute = self.stuck, self.mute or self.stuck
        self.looked_at = self.boot
        self.feed(table.Answered(self.now, self.engine(), "run"))

    def ineligible(self) -> None:
        self.feed(table.Answered(self.now, self.engine(), "run", Ineligible("flags", "flags")))

    def silent(self) -> None:
        self.now += 5.0
        self.feed(table.Silent(self.now, self.now - 5.0, "no answer"))

    def hopeless(self) -> None:
        self.feed(table.Silent(self.now, self.now, "it ended", hopeless=True))

    def token(self) -> None:
        self.mute = False
        self.feed(table.Generated(self.now, True))

    def no_token(self) -> None:
        self.feed(table.Generated(self.now, False))

    def proven(self, late: bool = False) -> None:
        self.swap(verdict=True)
        # None where the learner heard meanwhile that the process is another one.
        self.proof = None if self.member.process.attempt is None else (self.boot, self.running.version)
        self.feed(table.Proven(self.now, self.running, METRICS, late))

    def late(self) -> None:
        self.proven(late=True)

    def wrong(self) -> None:
        self.swap(verdict=True)
        self.proof = None
        self.unheard = self.queue.state is not QUARANTINED
        self.feed(table.Disproven(self.now, self.running, "its log-probs differ"))

    def failed(self) -> None:
        self.feed(table.CallFailed(self.now, self.running, "refused", engine=self.engine()))

    def unasked(self) -> None:
        publishes = self.member.call == "publish"
        self.swap()
        self.feed(table.CallFailed(self.now, self.running, "no answer", engine=self.engine() if publishes else None))

    def lost(self) -> None:
        self.swap()
        self.feed(table.CallFailed(self.now, self.running, "no answer", asked=self.now))

    def half_loaded(self) -> None:
        self.unheard = self.queue.state is not QUARANTINED
        self.feed(table.CallFailed(self.now, self.running, "failed half-way", left_paused=True))

    def given_up(self) -> None:
        self.swap()
        self.feed(table.CallFailed(self.now, self.running, "given up for a newer version"))

    def no_room(self) -> None:
        self.feed(table.NoRoom(self.now))

    def newer(self) -> None:
        self.newest += 1
        self.feed(table.Wanted(self.now, self.newest_weights))

    def restarts(self) -> None:
        self.boot, self.label, self.stuck = self.boot + 1, "default", False

    def stops(self) -> None:
        self.stuck = True

    def goes_on(self) -> None:
        self.stuck = False

    def queue_goes(self) -> None:
        self.queue_down = True

    def rejoins(self) -> None:
        """Another process registers the server again, as after a restart."""
        if self.queue.state is not ServerState.DRAINING:
            record = ServerRegistry([self.record]).decide(Server("a", "http://a"), self.now, 0)
            self.record = record or self.record
            self.looked_at = self.proof = self.undecided = None  # the queue distrusts what was open
            self.mute = self.seen_stuck = False
            self.feed(table.Registered(self.now, self.queue))

    def drains(self) -> None:
        record = ServerRegistry([self.record]).leave("a", self.now)
        if record is not None:
            self.record = record
            self.feed(table.Registered(self.now, self.queue))

    def behind(self) -> None:
        self.feed(table.Compared(self.now, Lag(5, "b", 0.0, True)))

    def watched(self) -> None:
        if self.running is not None:
            self.seen_stuck, self.mute, self.watching = self.stuck, self.mute or self.stuck, True
            self.feed(table.Answered(self.now, self.engine(), "run"))
            self.watching = False

    def leaves(self) -> None:
        paused = self.running is not None and self.member.process.attempt is not None
        down = self.queue_down
        self.feed(table.Left(self.now, left_paused=paused))
        if paused and not down:
            assert self.queue.state in (QUARANTINED, ServerState.DRAINING), "it is left paused and in service (I6)"
        self.left, self.running = True, None

    def settle(self) -> None:
        """Let all go well: the server must come to serve the newest version."""
        self.queue_down = self.stuck = False
        for _ in range(20):
            if self.member.up_to_date and self.queue.state is SERVING:
                return
            self.now += 61.0 if self.member.call == "wait" else 0.0
            self.do(next((choice for choice in WELL if choice in self.choices), ""))
        raise AssertionError("it waits for ever, though all goes well")


# How calls end where all goes well; what was cut off by a restart fails.
WELL = ["due", "answered", "token", "opens", "proven", "failed", "unasked"]

# Events that answer a call.
ENDS = {
    *(table.Answered, table.Silent, table.Generated, table.NoRoom, table.Proven, table.Disproven, table.CallFailed),
    table.Refused,
}


def after(choices: list[str], decide: Decide = table.decide) -> World:
    world = World.began(decide)
    for choice in choices:
        world.do(choice)
    return world


BEGINNINGS = [
    ["answered", "opens"],
    ["answered", "opens", "proven", "due"],
    ["answered", "opens", "proven", "due", "newer", "answered", "opens"],
    ["answered", "opens", "proven", "due", "newer", "answered", "opens", "unasked", "due"],
    ["answered", "opens", "proven", "due", "stops", "answered", "due"],
]


def walk(decide: Decide, depth: int) -> tuple[list[str], str] | None:
    """Try all short sequences after each of the beginnings. Returns the first that breaks what must hold, and what."""
    seen: set[Any] = set()
    layer = []
    for beginning in BEGINNINGS:
        try:
            layer.append((beginning, after(beginning, decide)))
        except AssertionError as error:
            return beginning, str(error)
    for _ in range(depth):
        following = []
        for path, world in layer:
            for choice in world.choices:
                then = copy(world)
                try:
                    then.do(choice)
                    if (key := then.key()) in seen:
                        continue
                    if not then.left and then.queue.state is not ServerState.DRAINING:
                        copy(then).settle()
                except AssertionError as error:
                    return [*path, choice], str(error).partition("\n")[0]
                seen.add(key)
                following.append(([*path, choice], then))
        layer = following
    return None


def test_all_short_sequences_keep_what_must_hold() -> None:
    assert walk(table.decide, 4) is None


@given(st.lists(st.sampled_from(CHOICES), max_size=60))
def test_long_sequences_keep_what_must_hold(choices: list[str]) -> None:
    world = after(choices)
    if not world.left and world.queue.state is not ServerState.DRAINING:
        world.settle()


# Wrong tables: what is wrong, the event, and a function of the state before, the event and the decision.
Mutation = Callable[[MemberState, Any, MemberState, tuple[Any, ...]], Decision]


def about(state: MemberState, **changes: Any) -> MemberState:
    return replace(state, process=replace(state.process, **changes))


def serves(state: MemberState, event: Any) -> tuple[Any, ...]:
    first = () if state.server.state in (SERVING, ServerState.SYNCING) else (Tell(ServerState.SYNCING),)
    return *first, Tell(SERVING, event.weights.version)


MUTATIONS: dict[str, tuple[type[Event], Mutation]] = {
    "proof failed -> serves": (table.Disproven, lambda was, event, state, _: (state, serves(was, event))),
    "proof failed -> stale": (
        table.Disproven,
        lambda was, event, state, _: (state, (Tell(ServerState.SYNCING), Tell(ServerState.STALE))),
    ),
    "proof failed while the queue is away -> forgotten": (
        table.Disproven,
        lambda was, event, state, actions: (replace(state, unheard=None), actions),
    ),
    "proof could not be asked -> serves": (
        table.CallFailed,
        lambda was, event, state, actions: (state, serves(was, event) if was.call == "prove" else actions),
    ),
    "swapped without a verdict -> forgotten": (
        table.CallFailed,
        lambda was, event, state, actions: (about(state, unproven=None), actions),
    ),
    "cut off by an error -> forgotten": (
        table.Due,
        lambda was, event, state, actions: (about(state, unproven=was.process.unproven), actions),
    ),
    "restart -> keeps its version and state": (
        table.Answered,
        lambda was, event, state, actions: (
            (about(was, boot=event.engine.boot), ())
            if was.call == "look" and was.process.boot not in (None, event.engine.boot)
            else (state, actions)
        ),
    ),
    "restart while the queue is away -> forgotten": (
        table.Answered,
        lambda was, event, state, actions: (replace(state, unheard=None), actions),
    ),
    "restart -> the queue is not told": (
        table.Answered,
        lambda was, event, state, actions: (state, tuple(of for of in actions if getattr(of, "state", 0) != JOINING)),
    ),
    "registered again while proven -> serves": (
        table.Proven,
        lambda was, event, state, actions: (state, actions) if was.process.attempt else (state, serves(was, event)),
    ),
    "proven late -> serves": (
        table.Proven,
        lambda was, event, state, actions: (
            (state, serves(was, event)) if event.late and was.process.attempt else (state, actions)
        ),
    ),
    "proven -> serves the version before": (
        table.Proven,
        lambda was, event, state, actions: (
            state,
            tuple(
                replace(of, version=max(0, of.version - 1)) if isinstance(of, Tell) and of.state is SERVING else of
                for of in actions
            ),
        ),
    ),
    "proven -> the queue is not told": (
        table.Proven,
        lambda was, event, state, actions: (state, tuple(of for of in actions if not isinstance(of, Tell))),
    ),
    "newer weights -> a second publication": (
        table.Wanted,
        lambda was, event, state, actions: (replace(state, call="publish"), actions),
    ),
    "answered in a publication -> taken for a look": (
        table.Answered,
        lambda was, event, state, actions: table.decide(replace(was, call="look"), event),
    ),
    "call failed -> waits for ever": (
        table.CallFailed,
        lambda was, event, state, actions: (about(state, next_try=1e12), actions),
    ),
    "no room -> waits for ever": (
        table.NoRoom,
        lambda was, event, state, actions: (replace(state, call="left"), actions),
    ),
    "no token -> counts as one": (
        table.Generated,
        lambda was, event, state, actions: (about(state, must_step=False), actions),
    ),
    "generates nothing -> stays in service": (
        table.Answered,
        lambda was, event, state, actions: (
            state,
            tuple(of for of in actions if getattr(of, "state", 0) != ServerState.STALE),
        ),
    ),
    "may not be used -> published to": (
        table.Answered,
        lambda was, event, state, actions: (replace(state, call="publish") if event.ineligible else state, actions),
    ),
    "left -> continues": (table.Left, lambda was, event, state, actions: (was, actions)),
    "left paused -> stays in service": (table.Left, lambda was, event, state, actions: (state, ())),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_walk_finds_each_wrong_table(name: str) -> None:
    of, mutation = MUTATIONS[name]

    def wrong(was: MemberState, event: Event) -> Decision:
        state, actions = table.decide(was, event)
        return (
            mutation(was, event, state, actions) if isinstance(event, of) and was.call != "left" else (state, actions)
        )

    assert walk(wrong, 4) is not None
