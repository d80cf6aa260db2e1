"""Decisions about one server, as rows: the state before, an event, and what the queue is told and what comes next."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slipstream.protocol.engine import COMPUTES, NO_ANSWER, STOPPED, EngineState
from slipstream.protocol.messages import Proof, Server, ServerState
from slipstream.weight_sync.fleet.decisions import Lag
from slipstream.weight_sync.fleet.eligibility import Ineligible
from slipstream.weight_sync.fleet.member_state import (
    Answered,
    CallFailed,
    Compared,
    Disproven,
    Due,
    Event,
    Generated,
    Left,
    MemberState,
    NoRoom,
    Opened,
    Process,
    Proven,
    Registered,
    Silent,
    Tell,
    Told,
    Wanted,
    Weights,
    decide,
)
from slipstream.weight_sync.fleet.publications import ServerMetrics

S = ServerState
V1, V2 = Weights(1, "run:1"), Weights(2, "run:2")
METRICS = ServerMetrics(0.1, 0.01, 0.2, 1e-6)
ENGINE = EngineState("boot", "run:1", False, True, True, "none", 1, "gloo")
SWAPPED, RESTARTED = replace(ENGINE, label="run:2"), replace(ENGINE, boot="other", label="default")
BY_PERSON = replace(ENGINE, paused=True, pause_owner="person")
STUCK = replace(ENGINE, stuck="no step for 10 s")

FIRST = MemberState(Server("a", "http://a"), 8, target=V1, answers=True)
SERVES = replace(
    FIRST, server=Server("a", "http://a", S.SERVING, 1), process=Process("boot", 1, frozenset({"run:1"})), call="look"
)
BEHIND = replace(SERVES, target=V2)


def queue_has(state: MemberState, known: ServerState, reason: str | None = None) -> MemberState:
    return replace(state, server=replace(state.server, state=known, reason=reason))


def process(state: MemberState, **changes: Any) -> MemberState:
    return replace(state, process=replace(state.process, **changes))


def running(state: MemberState, call: Any = "publish") -> MemberState:
    return process(replace(state, call=call), attempt=V2, labels=frozenset({"run:1", "run:2"}))


PUBLISHES = running(BEHIND)
PROVES = process(running(queue_has(BEHIND, S.SYNCING), "prove"), unproven=V2)
STANDS = queue_has(process(SERVES, told_stuck="no step"), S.STALE, "no step")


def silent(why: str = NO_ANSWER, asked: float = 0.0, now: float = 5.0, **more: Any) -> Silent:
    return Silent(now, asked, f"http://a: {why}", **more)


# What, the state before, the event, what the queue is told, and the next call.
ROWS: list[tuple[str, MemberState, Event, list[Any], str]] = [
    ("the first look publishes", replace(FIRST, call="look"), Answered(1, ENGINE, "run"), [], "publish"),
    ("a first publication", replace(FIRST, call="publish"), Opened(1, V1), [S.SYNCING], "publish"),
    ("nothing to publish", replace(FIRST, call="look", target=None), Answered(1, ENGINE, "run"), [], "wait"),
    ("up to date", SERVES, Answered(1, ENGINE, "run"), [], "wait"),
    ("a newer version", BEHIND, Answered(1, ENGINE, "run"), [], "publish"),
    ("not due yet", process(BEHIND, next_try=9.0), Answered(1, ENGINE, "run"), [], "wait"),
    ("proven while it serves", PUBLISHES, Proven(1, V2, METRICS), [(S.SERVING, 2)], "wait"),
    ("proven late while it serves", PUBLISHES, Proven(1, V2, METRICS, late=True), [(S.SERVING, 2)], "wait"),
    ("proven late", queue_has(PUBLISHES, S.STALE), Proven(1, V2, METRICS, late=True), [], "wait"),
    (
        "proven after a while",
        queue_has(PUBLISHES, S.STALE),
        Proven(1, V2, METRICS),
        [S.SYNCING, (S.SERVING, 2)],
        "wait",
    ),
    ("proven while it drains", queue_has(PUBLISHES, S.DRAINING), Proven(1, V2, METRICS), [(S.SERVING, 2)], "wait"),
    ("proven for a process that has gone", process(PUBLISHES, attempt=None), Proven(1, V2, METRICS), [], "wait"),
    ("proof failed", PUBLISHES, Disproven(1, V2, "wrong"), [(S.QUARANTINED, 2)], "wait"),
    (
        "proof failed, first",
        queue_has(PUBLISHES, S.STALE),
        Disproven(1, V2, "wrong"),
        [S.SYNCING, (S.QUARANTINED, 2)],
        "wait",
    ),
    (
        "proof failed while it drains",
        queue_has(PUBLISHES, S.DRAINING),
        Disproven(1, V2, ""),
        [(S.QUARANTINED, 2)],
        "wait",
    ),
    ("in quarantine, the first version counts", queue_has(PUBLISHES, S.QUARANTINED), Disproven(1, V2, ""), [], "wait"),
    ("a transfer failed", PUBLISHES, CallFailed(1, V2, "lost", engine=ENGINE), [], "wait"),
    (
        "a transfer failed, stale",
        queue_has(PUBLISHES, S.SYNCING),
        CallFailed(1, V2, "lost", engine=ENGINE),
        [S.STALE],
        "wait",
    ),
    ("the proof could not be asked", PUBLISHES, CallFailed(1, V2, "lost", engine=SWAPPED), [S.SYNCING], "wait"),
    (
        "half loaded",
        PUBLISHES,
        CallFailed(1, V2, "", engine=replace(ENGINE, whole=False)),
        [(S.QUARANTINED, 2)],
        "wait",
    ),
    ("left paused", PUBLISHES, CallFailed(1, V2, "lost", left_paused=True), [(S.QUARANTINED, 2)], "wait"),
    ("given up", PUBLISHES, CallFailed(1, V2, "given up"), [], "wait"),
    ("asked again in vain", PROVES, CallFailed(1, V2, "lost"), [S.SYNCING], "wait"),
    ("asked again and proven", PROVES, Proven(1, V2, METRICS), [(S.SERVING, 2)], "wait"),
    ("proven, and stuck", process(PROVES, stuck="no step"), Proven(1, V2, METRICS), [(S.SERVING, 2), S.STALE], "wait"),
    ("asked again and wrong", PROVES, Disproven(1, V2, "wrong"), [(S.QUARANTINED, 2)], "wait"),
    (
        "unproven is proven before a newer one",
        process(BEHIND, unproven=V2, labels=frozenset({"run:2"})),
        Answered(1, SWAPPED, "run"),
        [],
        "prove",
    ),
    ("unproven was never swapped in", process(BEHIND, unproven=V2), Answered(1, ENGINE, "run"), [], "publish"),
    ("it restarted", SERVES, Answered(1, RESTARTED, "run"), [S.JOINING], "wait"),
    ("weights of another origin", SERVES, Answered(1, replace(ENGINE, label="x:9"), "run"), [S.JOINING], "wait"),
    ("of another run", SERVES, Answered(1, ENGINE, "run", Ineligible("since 1 s", "x")), [S.DOWN], "wait"),
    (
        "of another run still",
        queue_has(replace(SERVES, ineligible=Ineligible("since 1 s", "x")), S.DOWN),
        Answered(1, ENGINE, "run", Ineligible("since 2 s", "x")),
        [],
        "wait",
    ),
    ("a person paused it", SERVES, Answered(1, BY_PERSON, "run"), [S.STALE], "wait"),
    ("it is stuck", SERVES, Answered(1, STUCK, "run"), [S.STALE], "wait"),
    (
        "it is stuck before its first",
        replace(FIRST, call="look"),
        Answered(1, STUCK, "run"),
        [S.SYNCING, S.STALE],
        "wait",
    ),
    ("it is stuck in a publication", PUBLISHES, Answered(1, STUCK, "run"), [S.STALE], "publish"),
    ("it must step", process(STANDS, must_step=True), Answered(1, ENGINE, "run"), [], "generate"),
    ("it does not step", replace(process(STANDS, must_step=True), call="generate"), Generated(1, False), [], "wait"),
    ("it continues", STANDS, Answered(1, ENGINE, "run"), [S.SYNCING, (S.SERVING, 1)], "wait"),
    ("it continues, behind", replace(STANDS, target=V2), Answered(1, ENGINE, "run"), [], "publish"),
    ("slow", SERVES, Answered(1, replace(ENGINE, step_s=5.0), "run"), [(S.SERVING, 1)], "wait"),
    (
        "slow before it serves",
        replace(FIRST, call="look"),
        Answered(1, replace(ENGINE, step_s=5.0), "run"),
        [],
        "publish",
    ),
    ("no longer slow", replace(SERVES, slow="slow"), Answered(1, ENGINE, "run"), [(S.SERVING, 1)], "wait"),
    ("silent for a moment", SERVES, silent(), [], "wait"),
    ("silent for long", SERVES, silent(now=10.0), [S.DOWN], "wait"),
    (
        "silent since the first question",
        replace(SERVES, silent_since=0.0),
        silent(asked=9.0, now=10.0),
        [S.DOWN],
        "wait",
    ),
    ("silent after a failed publication", replace(SERVES, silent_since=0.5), silent(asked=9, now=10.4), [], "wait"),
    ("silent in long steps", process(SERVES, step_s=5.0), silent(now=14.0), [], "wait"),
    ("silent for several long steps", process(SERVES, step_s=5.0), silent(now=15.0), [S.DOWN], "wait"),
    ("it computes", SERVES, silent(COMPUTES, now=59.0), [], "wait"),
    ("it computes for too long", SERVES, silent(COMPUTES, now=60.0), [S.DOWN], "wait"),
    ("it is stopped", SERVES, silent(STOPPED, now=10.0), [S.DOWN], "wait"),
    ("it has ended", SERVES, silent("it ended", hopeless=True), [S.DOWN], "wait"),
    ("silent in a publication", PUBLISHES, silent(now=10.0), [S.DOWN], "publish"),
    ("stale and silent: this is why", queue_has(SERVES, S.STALE, "2 versions behind"), silent(), [S.STALE], "wait"),
    ("not up yet", replace(FIRST, call="look"), silent(unconnected="refused"), [S.JOINING], "wait"),
    ("down already", queue_has(SERVES, S.DOWN, "x"), silent(now=99.0), [], "wait"),
    ("no room", replace(BEHIND, call="publish"), NoRoom(1), [], "wait"),
    ("too far behind", BEHIND, Compared(1, Lag(4, "b", 0.0, True)), [S.STALE], "look"),
    ("too far behind for a moment", BEHIND, Compared(1, Lag(4, "b", 0.2, True)), [], "look"),
    ("behind, not too far", BEHIND, Compared(1, Lag(1, "b", 0.0, False)), [], "look"),
    ("a newer version in a publication", PUBLISHES, Wanted(1, Weights(3, "run:3")), [], "publish"),
    ("registered again in a publication", PUBLISHES, Registered(1, Server("a", "http://a")), [], "publish"),
    ("it drains", replace(queue_has(SERVES, S.DRAINING), call="wait"), Due(1), [S.DRAINING], "wait"),
    ("it has drained", replace(queue_has(SERVES, S.DRAINING), call="wait", settled_at=0.0), Due(1), [], "wait"),
    (
        "a verdict that the queue has not heard",
        replace(SERVES, unheard=Tell(S.QUARANTINED, 2, "wrong")),
        Due(1),
        [(S.QUARANTINED, 2)],
        "look",
    ),
    (
        "a restart that the queue has not heard of",
        replace(SERVES, unheard=Tell(S.JOINING)),
        Due(1),
        [S.JOINING],
        "look",
    ),
    ("it leaves", PUBLISHES, Left(1, left_paused=False), [], "left"),
    ("it leaves paused", PUBLISHES, Left(1, left_paused=True), [(S.QUARANTINED, 2)], "left"),
    ("it has left", replace(SERVES, call="left"), Answered(1, RESTARTED, "run"), [], "left"),
]


@pytest.mark.parametrize(("before", "event", "told", "call"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_rows(before: MemberState, event: Event, told: list[Any], call: str) -> None:
    state, actions = decide(before, event)
    tells = [of for of in actions if isinstance(of, Tell)]
    assert [of.state if of.version is None else (of.state, of.version) for of in tells] == told
    assert state.call == call


# What, the state before, the event, and what the state says of the process then.
KNOWN: list[tuple[str, MemberState, Event, dict[str, Any]]] = [
    ("proven", PUBLISHES, Proven(1, V2, METRICS), {"version": 2, "labels": {"run:2"}, "attempt": None, "failures": 0}),
    ("it restarted", SERVES, Answered(1, RESTARTED, "run"), {"boot": "other", "version": None, "labels": set()}),
    ("registered again", PUBLISHES, Registered(1, Server("a", "http://a")), {"version": None, "attempt": None}),
    ("a wrong one is sent again at once", PUBLISHES, Disproven(1, V2, ""), {"version": None, "next_try": 1.0}),
    ("but once", process(PUBLISHES, failures=1), Disproven(1, V2, ""), {"next_try": 5.0, "failures": 2}),
    ("a failed call pauses", PUBLISHES, CallFailed(1, V2, "", engine=ENGINE), {"version": 1, "next_try": 3.0}),
    ("not swapped in", PUBLISHES, CallFailed(1, V2, "", engine=ENGINE), {"unproven": None, "attempt": None}),
    ("swapped in", PUBLISHES, CallFailed(1, V2, "", engine=SWAPPED), {"unproven": V2}),
    ("maybe swapped in", PUBLISHES, CallFailed(1, V2, "", asked=1.0), {"unproven": V2}),
    ("given up, maybe swapped in", PUBLISHES, CallFailed(1, V2, ""), {"unproven": V2}),
    ("cut off by an error", PUBLISHES, Due(1), {"unproven": V2, "attempt": None}),
    ("left paused", PUBLISHES, CallFailed(1, V2, "", left_paused=True), {"unproven": None, "version": None}),
    (
        "first answer after silence",
        process(replace(BEHIND, answers=False), next_try=9.0),
        Answered(1, ENGINE, "run"),
        {"next_try": 0.0},
    ),
    (
        "a first version forgives failures",
        process(BEHIND, failures=2, next_try=9.0),
        Wanted(1, V2, at_once=True),
        {"failures": 0, "next_try": 0.0},
    ),
    ("not behind", process(BEHIND, behind_since=0.5), Compared(1, None), {"behind_since": None}),
    ("behind since", process(BEHIND, behind_since=0.5), Compared(1, Lag(1, "b", 9.0, True)), {"behind_since": 0.5}),
]


@pytest.mark.parametrize(("before", "event", "known"), [row[1:] for row in KNOWN], ids=[row[0] for row in KNOWN])
def test_what_is_known_of_the_process(before: MemberState, event: Event, known: dict[str, Any]) -> None:
    state, _ = decide(before, event)
    assert {name: getattr(state.process, name) for name in known} == known


def test_an_adapter_is_never_swapped_in_without_a_verdict() -> None:
    adapter = Weights(2, "adapter-2", adapter=True)
    state, _ = decide(process(PUBLISHES, attempt=adapter), CallFailed(1, adapter, "lost", asked=1.0))
    assert state.process.unproven is None


@pytest.mark.parametrize(
    ("target", "transport"), [(V1, "gloo"), (Weights(1, "run:1", adapter=True), "adapter"), (None, "gloo")]
)
def test_an_adapter_is_not_said_to_travel_by_the_transport_of_the_weights(
    target: Weights | None, transport: str
) -> None:
    """`servers list` and publications.jsonl: it goes over HTTP, also where the server was started for gloo."""
    state, _ = decide(replace(SERVES, target=target), Answered(1, ENGINE, "run"))
    assert state.transport == transport


def test_what_the_queue_is_told() -> None:
    _, (told, *_) = decide(PUBLISHES, Proven(1, V2, METRICS))
    assert told == Tell(S.SERVING, 2, proof=Proof(2, 1e-6, 0.1, 0.01), must=True)
    _, (told,) = decide(BEHIND, Compared(1, Lag(4, "b", 0.0, True)))
    assert told.reason == "4 versions behind, unlike b; it waits for an answer of its engine"
    _, (told,) = decide(SERVES, silent(now=10.0))
    assert (
        told.reason
        == f"its engine does not answer: http://a: {NO_ANSWER}; it makes no progress: look at its process and its log"
    )
    _, (told,) = decide(SERVES, silent("it ended", hopeless=True))
    assert told.reason == "its engine does not answer: http://a: it ended"
    state, (_, told) = decide(SERVES, Answered(1, replace(ENGINE, step_s=5.0), "run"))
    assert state.slow == "its engine takes up to 5 s for a step: lower vllm.max_num_seqs = 8"
    state, _ = decide(state, silent(now=20.0))
    assert state.slow is None, "the remedy for long steps is none for a server that makes no step"


def test_a_verdict_is_kept_until_the_queue_has_heard_it() -> None:
    state, _ = decide(PUBLISHES, Disproven(1, V2, "wrong"))
    state, tells = decide(state, Due(1))
    assert tells == (Tell(S.QUARANTINED, 2, "wrong"),)
    state, _ = decide(state, Told(1, S.QUARANTINED, replace(state.server, state=S.QUARANTINED)))
    assert decide(replace(state, call="wait"), Due(1))[1] == ()


@pytest.mark.parametrize(
    ("state", "seconds"),
    [
        (SERVES, 2.0),
        (BEHIND, 0.0),
        (process(BEHIND, next_try=1.5), 0.5),
        (process(BEHIND, next_try=9.0), 2.0),
        (process(BEHIND, must_step=True), 2.0),
        (replace(BEHIND, no_room=True), 2.0),
        (replace(BEHIND, answers=False), 2.0),
        (replace(BEHIND, target=None), 2.0),
    ],
)
def test_there_is_no_pause_where_something_can_be_published(state: MemberState, seconds: float) -> None:
    assert state.pause_s(1.0) == seconds
