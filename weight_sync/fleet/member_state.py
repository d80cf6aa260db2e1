"""Decides about one server of the fleet: which weights it holds, whether it may serve, which call comes next. Pure.

`decide(state, event)` returns the next state and actions. Time is in the events.
A round is a look at the server, at most one more call, and a wait; `member.Member` makes the calls and turns their
answers into events.

- A version serves once a proof of it held on the server's present process (I5). A restart, weights of another origin
  or a new registration forget all that is known of the process.
- A failed proof, a model that is not whole, or a server that is left paused quarantine the server: `_taint` alone does
  that (I5, I6). If the queue was not there to hear it, or of a restart, it is told before anything else.
- A publication that ended without a verdict may have been swapped in. Its proof is asked before anything else is
  published, as the proof of a newer version would count for it too.
- A server that generates nothing leaves service, and serves again without a publication.
- One that has not answered for `DOWN_AFTER_S`, or for several of its steps where these take longer, or for
  `COMPUTING_DOWN_AFTER_S` while its processes compute, is down. So is one that the run may not use.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from slipstream.protocol.engine import COMPUTES, EngineState
from slipstream.protocol.messages import PAUSED_BY_PERSON, Proof, Server, ServerState
from slipstream.weight_sync.fleet.decisions import SILENT_STEPS, Lag, is_slow, patience_s, retry_pause_s
from slipstream.weight_sync.fleet.eligibility import Ineligible, find_lost_weights
from slipstream.weight_sync.fleet.publications import ServerMetrics
from slipstream.weight_sync.transports.registry import of_backend

# Seconds between looks at a server, which show a restart, and an engine that hangs in a publication.
LOOK_EVERY_S = 2.0

# Seconds without an answer after which a server that served counts as down, unless its steps take longer: requests to
# it would hang. One whose engine computes may be in its first long step: its limit is higher, lest that be a hang too.
DOWN_AFTER_S = 10.0
COMPUTING_DOWN_AFTER_S = 60.0

_S = ServerState


# The call that runs, one at a time. "generate" asks for a token, "prove" for the proof of weights that were swapped in
# before, "left" ends all calls.
Call = Literal["wait", "look", "generate", "publish", "prove", "left"]
_PUBLISHES = ("publish", "prove")


class Weights(Struct, frozen=True):
    """Names weights. An adapter serves only once it is proven, so that none is ever swapped in without a verdict."""

    version: int
    label: str
    adapter: bool = False


class Tell(Struct, frozen=True):
    """Tell the queue a state. `must`: what follows makes no sense if it refuses."""

    state: ServerState
    version: int | None = None
    reason: str | None = None
    proof: Proof | None = None
    must: bool = False


class Process(Struct, frozen=True):
    """What is known of the server's present process. A restart forgets all of it."""

    boot: str | None = None  # Its id, None before the first look.
    version: int | None = None  # The one proven on it, None before.
    labels: frozenset[str] = frozenset()  # Those that it may hold as a result of our publications.
    attempt: Weights | None = None  # What the publication or proof that runs is about.
    unproven: Weights | None = None  # May have been swapped in, and their proof has not ended.
    failures: int = 0  # Failed publications in a row.
    next_try: float = 0.0  # When the next publication or proof is due.
    behind_since: float | None = None  # When it was first found behind the others, None while it is not.
    step_s: float = 0.0  # Seconds of its engine's longest step lately.
    stuck: str | None = None  # Why it generates nothing, for people; None where it may.
    by_person: bool = False  # Whether a person paused it.
    must_step: bool = False  # Whether it could not generate and nobody has ended that: it must, before it serves.
    told_stuck: str | None = None  # Why it was taken out of service though nothing failed.


class MemberState(Struct, frozen=True):
    """One server of the fleet."""

    server: Server  # As the queue knows it.
    max_num_seqs: int = 0
    process: Process = Process()
    call: Call = "wait"
    target: Weights | None = None  # The newest, None before the first.
    waits_for: str | None = None  # What keeps it from being up to date, for people.
    start_text: str | None = None  # How it shows that it has not started yet, for people; None once it has.
    answers: bool = False  # Whether it answered at the last look.
    silent_since: float | None = None  # When the first was asked of the questions in a row without an answer.
    ineligible: Ineligible | None = None  # Why the run may not use it.
    no_room: bool = False  # Whether servers that still get an older version keep it from the newest.
    took_s: float = 0.0  # Seconds of its last publication.
    slow: str | None = None  # Why it is slow, with the remedy; None while it is not.
    transport: str | None = None  # How weights travel to it, None while it has not said so.
    unheard: Tell | None = None  # After a failed proof, or where a process is forgotten, until the queue has heard it.
    settled_at: float | None = None  # The drain for which the queue knows that nothing is on its way to it.

    @property
    def up_to_date(self) -> bool:
        if self.server.state is not _S.SERVING:
            return self.server.state is _S.DRAINING
        return self.target is None or self.process.version == self.server.version == self.target.version

    @property
    def wait_text(self) -> str | None:
        return self.start_text or (f"waits for {self.obstacle}" if self.obstacle else None)

    @property
    def obstacle(self) -> str | None:
        """What it waits for: also a look that began while it was up to date."""
        looks = self.call == "look" and not self.up_to_date
        return self.waits_for or ("an answer of its engine" if looks else None)

    def pause_s(self, now: float) -> float:
        """Return the seconds until the next look: none where there is something to publish."""
        barred = self.process.stuck or self.process.must_step or self.ineligible or self.no_room or self.target is None
        if (left_s := self.process.next_try - now) > 0:
            return min(LOOK_EVERY_S, left_s)
        return 0.0 if self.answers and not barred and not self.up_to_date else LOOK_EVERY_S


class Event(Struct, frozen=True):
    """`now` is when it happened, `asked` when a question was asked that has no answer (`time.monotonic`)."""

    now: float


class Due(Event, frozen=True):  # The wait is over, or the task begins, as after an error in the middle of a call.
    pass


class Wanted(Event, frozen=True):  # There are newer weights. `at_once`: earlier failures do not count.
    target: Weights | None
    at_once: bool = False


class Registered(Event, frozen=True):  # Another process changed the server in the queue's registry.
    server: Server


class Told(Event, frozen=True):  # The queue took in the state `told`.
    told: ServerState
    server: Server


class Refused(Event, frozen=True):  # The queue refused a `Tell` that has `must`.
    reason: str


class Answered(Event, frozen=True):  # The engine did, at a look, which alone asks `ineligible`, or in a publication.
    engine: EngineState
    run_id: str
    ineligible: Ineligible | None = None


class Silent(Event, frozen=True):  # The engine did not answer, at a look or in a publication. `why` has the URL.
    asked: float
    why: str
    hopeless: bool = False  # It cannot answer again before a restart.
    unconnected: str | None = None  # Why nothing listens at its address.
    step_s: float | None = None


class Generated(Event, frozen=True):  # The server was asked for a token. `token`: whether it generated one.
    token: bool


class NoRoom(Event, frozen=True):  # Two older versions are still on their way to other servers.
    pass


class Opened(Event, frozen=True):  # A publication begins.
    weights: Weights


class Proven(Event, frozen=True):  # The server computes with these weights. `late`: it would be stale with them.
    weights: Weights
    metrics: ServerMetrics
    late: bool = False


class Disproven(Event, frozen=True):  # The server computes with other weights.
    weights: Weights
    reason: str


class CallFailed(Event, frozen=True):  # A publication or a proof ended without a verdict.
    weights: Weights
    reason: str
    left_paused: bool = False  # It may stand still with a half-loaded model.
    engine: EngineState | None = None  # After a failed publication; without `asked`, for one that was given up, None.
    asked: float | None = None  # When it was asked during the publication or after it, in vain.


class Compared(Event, frozen=True):  # `lag` behind the others; None where none of them is ahead.
    lag: Lag | None


class Left(Event, frozen=True):  # The server has left the fleet, or the learner ends.
    left_paused: bool


class Warn(Struct, frozen=True):  # Log a warning about the server.
    text: str


class NoteProven(Struct, frozen=True):  # Count the server for a version.
    version: int
    metrics: ServerMetrics


class NoteFailed(Struct, frozen=True):  # Note in a version's record why the server does not have it.
    version: int
    reason: str


Action = Tell | Warn | NoteProven | NoteFailed
Decision = tuple[MemberState, tuple[Action, ...]]
_NOTHING: tuple[Action, ...] = ()


def decide(state: MemberState, event: Event) -> Decision:
    """Return the state after an event, and what to do in this order before `state.call`."""
    if state.call == "left":
        return state, _NOTHING
    match event:
        case Due():
            return _begin_round(state)
        case Wanted(target=target, at_once=at_once):
            state = replace(state, target=target)
            return (_process(state, failures=0, next_try=0.0) if at_once else state), _NOTHING
        case Registered(server=server):
            process = Process() if server.state is _S.JOINING else state.process
            return replace(state, server=server, process=process), _NOTHING
        case Told(told=told, server=server):
            state = replace(state, settled_at=server.changed_at) if told is _S.DRAINING else state
            heard = state.unheard is None or state.unheard.state is told
            return replace(state, server=server, unheard=None if heard else state.unheard), _NOTHING
        case Refused(reason=reason):
            # It registered again or was removed meanwhile: the registry, which is read soon, says which.
            version = state.target.version if state.target is not None else 0
            return _fail(replace(state, process=Process()), event, version, f"{state.server.name}: {reason}")
        case Answered() if state.call in _PUBLISHES:  # it continues
            leave = state.server.state is _S.SERVING
            return _note_standstill(replace(state, silent_since=None), event.engine, leave)
        case Answered():
            return _answered(state, event)
        case Silent():
            state, actions = _silent(state, event)
            return (state, actions) if state.call in _PUBLISHES else _wait(state, actions)
        case Generated(token=token):
            return _wait(_process(state, must_step=not token))
        case NoRoom():
            return _wait(replace(state, no_room=True, waits_for="servers that still get an older version"))
        case Opened(weights=weights):
            state = _process(state, attempt=weights, labels=state.process.labels | {weights.label})
            state = replace(state, waits_for=f"version {weights.version}, which is on its way")
            return state, (Tell(_S.SYNCING, must=True),) if state.server.state is _S.JOINING else ()
        case Proven():
            return _proven(state, event)
        case Disproven(weights=weights, reason=reason):
            # It is sent whole once more, at once; so is what was sent long ago.
            at_once = state.call == "prove" or state.process.failures == 0
            state, tells = _taint(_process(state, attempt=None, unproven=None), weights.version, reason)
            return _fail(state, event, weights.version, reason, tells, at_once)
        case CallFailed():
            return _call_failed(state, event)
        case Compared(lag=lag):
            return _compared(state, event.now, lag)
        case Left(left_paused=left_paused):
            attempt, tells = state.process.attempt, _NOTHING
            if left_paused and attempt is not None:
                why = f"left paused: the learner ended before it had loaded version {attempt.version}"
                state, tells = _taint(state, attempt.version, f"{state.server.url}: {why}")
            return replace(state, call="left"), tells
        case _:
            raise TypeError(f"{event!r} is no event of a server")


def _begin_round(state: MemberState) -> Decision:
    unheard = _NOTHING if state.unheard is None else _first(state, state.unheard)
    state = _end_attempt(state, unproven=state.process.attempt)
    if state.server.state is _S.DRAINING:
        settled = state.settled_at == state.server.changed_at
        return _wait(state, unheard if settled else (*unheard, Tell(_S.DRAINING)))
    return replace(state, call="look", no_room=False), unheard


def _answered(state: MemberState, event: Answered) -> Decision:
    engine, before = event.engine, state.ineligible
    state, actions = _note_steps(state, engine.step_s)
    if not state.answers:
        state = _process(state, next_try=0.0)
    adapter = state.target is not None and state.target.adapter
    transport = "adapter" if adapter else of_backend(engine.transport) or engine.transport
    state = replace(state, answers=True, start_text=None, silent_since=None, transport=transport)
    state = replace(state, ineligible=event.ineligible)
    if event.ineligible is not None:
        state = replace(state, waits_for=event.ineligible.reason)
        if state.server.state is _S.DOWN and before is not None and before.cause == event.ineligible.cause:
            return _wait(state, actions)
        told = _tell(state, Tell(_S.DOWN, reason=event.ineligible.reason))
        state = replace(state, unheard=told[0] if told else None)
        open_ones = Process(unproven=state.process.unproven, must_step=state.process.must_step)
        return _wait(replace(state, process=open_ones), (*actions, *told))
    ours = None if state.process.version is None else state.process.labels
    lost = find_lost_weights(engine, state.process.boot, ours, event.run_id)
    if lost is not None:
        told = _tell(state, Tell(_S.JOINING, reason=lost))
        state = replace(state, process=Process(boot=engine.boot), unheard=told[0] if told else None)
        return _wait(state, (*actions, Warn(lost), *told))
    unproven = state.process.unproven
    swapped_in = unproven is not None and unproven.label == engine.label
    state = _process(state, boot=engine.boot, unproven=unproven if swapped_in else None)
    state, last = _next_call(replace(state, waits_for=None) if state.up_to_date else state, event)
    return state, (*actions, *last)


def _next_call(state: MemberState, event: Answered) -> Decision:
    """Decide what to do about a server that answers and that the run may use."""
    engine, target, due = event.engine, state.target, event.now >= state.process.next_try
    if (unproven := state.process.unproven) is not None and due:
        state = _process(_note_standstill(state, engine, leave=False)[0], attempt=unproven)
        return replace(state, call="prove", waits_for=f"the proof of version {unproven.version}"), _NOTHING
    if target is None:
        return _wait(state)
    state, tells = _note_standstill(state, engine, leave=True)
    process, server = state.process, state.server
    if process.stuck is not None:
        return _wait(replace(state, waits_for="a person's POST /resume" if process.by_person else process.stuck), tells)
    if process.must_step:
        waits_for = "a token that it generates, after it could not"
        return replace(state, call="generate", waits_for=waits_for), _NOTHING
    stood = server.state is _S.STALE and process.told_stuck is not None and server.reason == process.told_stuck
    if stood and process.version == target.version and engine.label == target.label and engine.whole:
        # The standstill was its only obstacle, and nothing has changed the weights that were proven (I5).
        return _wait(state, (Tell(_S.SYNCING), Tell(_S.SERVING, target.version)))
    if due and process.unproven is None and not state.up_to_date:
        return replace(state, call="publish"), _NOTHING
    return _wait(state)


def _silent(state: MemberState, event: Silent) -> Decision:
    server, before, actions = state.server, state.silent_since, _NOTHING
    if event.step_s is not None:
        state = _process(state, step_s=event.step_s)
    state = replace(state, answers=False, start_text=None, waits_for=f"an answer of its engine ({event.why})")
    if event.unconnected is not None and server.state is _S.JOINING:
        why = f"{server.url} does not answer yet ({event.unconnected})"
        state = replace(state, start_text=why, waits_for="its start")
        return state, () if server.reason is not None else (Tell(_S.JOINING, reason=why),)
    state = replace(state, silent_since=event.asked if before is None else before)
    least_s = COMPUTING_DOWN_AFTER_S if event.why.endswith(COMPUTES) else DOWN_AFTER_S
    silent_s = event.now - (event.asked if before is None else before)
    told = f"its engine does not answer: {event.why}"
    if server.state is _S.JOINING and server.reason is None:
        actions = (Tell(_S.JOINING, reason=f"not up yet: {event.why}"),)
    elif server.state in (_S.JOINING, _S.DOWN):
        pass
    elif event.hopeless or silent_s >= patience_s(least_s, state.process.step_s, SILENT_STEPS):
        look = "" if event.hopeless else "; it makes no progress: look at its process and its log"
        # The remedy for long steps is none for a server that makes no step at all.
        state, actions = replace(state, slow=None), (Tell(_S.DOWN, reason=told + look),)
    elif server.state is _S.STALE and state.process.stuck is None:  # it serves nothing anyway: this is why
        actions = _tell(state, Tell(_S.STALE, reason=told))
    return state, actions


def _proven(state: MemberState, event: Proven) -> Decision:
    process, metrics, version, tells = state.process, event.metrics, event.weights.version, _NOTHING
    if process.attempt != event.weights:
        return _wait(state)  # the server registered again meanwhile: which of its processes was proven is not known
    known = state.server.state in (_S.SERVING, _S.DRAINING)
    # What it sampled before it stood still waits for the proof, so the queue hears that this holds.
    verdict = state.call == "prove" and process.stuck is not None
    # A version that took long is old by now: serving it would hold up admission until the newest is there.
    if verdict or (process.stuck is None and not process.must_step and (known or not event.late)):
        proof = Proof(version, metrics.probe_max_abs_diff, metrics.transfer_s, metrics.pause_s)
        first = () if known or state.server.state is _S.SYNCING else (Tell(_S.SYNCING, must=True),)
        tells = (*first, *_tell(state, Tell(_S.SERVING, version, proof=proof, must=True)))
    if verdict and state.server.state is not _S.DRAINING:
        tells = (*tells, Tell(_S.STALE, reason=process.stuck))
        state = _process(state, told_stuck=process.stuck)
    state = _process(state, version=version, labels=frozenset({event.weights.label}), attempt=None, unproven=None)
    state = _process(state, failures=0, behind_since=None)
    state = replace(state, waits_for=None, took_s=metrics.took_s, unheard=None)
    return _wait(state, (*tells, NoteProven(version, metrics)))


def _call_failed(state: MemberState, event: CallFailed) -> Decision:
    server, engine, weights, actions = state.server, event.engine, event.weights, _NOTHING
    swapped = engine is not None and engine.label == weights.label and not weights.adapter
    swapped = swapped or state.call == "prove"
    state = _end_attempt(state, unproven=weights if swapped or (engine is None and not event.left_paused) else None)
    if event.asked is not None and state.silent_since is None:
        state = replace(state, silent_since=event.asked)
    if event.left_paused or (engine is not None and not swapped and not engine.whole):
        state, actions = _taint(state, weights.version, event.reason)
    elif swapped and server.state is not _S.QUARANTINED:
        # That is no verdict: what it sampled waits for the proof (I5).
        why = f"version {weights.version} is swapped in, and its proof could not be asked; it is asked again"
        actions = _tell(state, Tell(_S.SYNCING, reason=f"{why}: {event.reason}"))
    elif engine is None and event.asked is None:
        pass
    elif server.state is _S.SERVING:
        # It continues with its proven version; the fleet marks it stale if that falls too far behind.
        actions = (Warn(f"keeps version {server.version}: {event.reason}"),)
    elif server.state not in (_S.QUARANTINED, _S.DRAINING):
        first = (Tell(_S.SYNCING),) if server.state is _S.DOWN else ()
        actions = (*first, *_tell(state, Tell(_S.STALE, reason=event.reason)))
    return _fail(state, event, weights.version, event.reason, actions)


def _compared(state: MemberState, now: float, lag: Lag | None) -> Decision:
    if lag is None:
        return _process(state, behind_since=None), _NOTHING
    since = now if state.process.behind_since is None else state.process.behind_since
    state = _process(state, behind_since=since)
    if not lag.too_far or now - since < lag.grace_s:
        return state, _NOTHING
    doing = f"; it waits for {state.obstacle}" if state.obstacle else ""
    reason = f"{lag.versions} versions behind, unlike {lag.ahead}{doing}"
    return state, _tell(state, Tell(_S.STALE, reason=reason))


def _taint(state: MemberState, version: int, reason: str) -> Decision:
    """Distrust what the server samples from `version` on. One in quarantine keeps the first failed version: distrust
    begins there."""
    state = _process(state, version=None)
    if state.server.state is _S.QUARANTINED:
        return state, _NOTHING
    tell = Tell(_S.QUARANTINED, version, reason)
    return replace(state, unheard=tell), _first(state, tell)


def _first(state: MemberState, tell: Tell) -> tuple[Tell, ...]:
    """Return the state and, where a quarantine does not follow from the server's present one, one before it."""
    may = tell.state is not _S.QUARANTINED or state.server.state in (_S.SYNCING, _S.SERVING, _S.DRAINING)
    return (tell,) if may else (Tell(_S.SYNCING), tell)


def _tell(state: MemberState, tell: Tell) -> tuple[Tell, ...]:
    """Return the action; none where the queue knows the state."""
    known = state.server
    news = (known.state, known.reason) != (tell.state, tell.reason) or tell.version not in (None, known.version)
    return (tell,) if news else ()


def _note_steps(state: MemberState, step_s: float) -> Decision:
    """Note the engine's longest step lately, and tell when the server has become slow, or no longer is."""
    text = f"its engine takes up to {step_s:.0f} s for a step: lower vllm.max_num_seqs = {state.max_num_seqs}"
    slow = text if is_slow(step_s, state.slow is not None) else None
    state = _process(state, step_s=step_s)
    if (slow is None) == (state.slow is None):
        return state, _NOTHING
    # A server of which another state is told is not told apart.
    tells = (Tell(_S.SERVING, state.server.version),) if state.server.state is _S.SERVING else ()
    return replace(state, slow=slow), (*(() if slow is None else (Warn(f"is slow: {slow}"),)), *tells)


def _note_standstill(state: MemberState, engine: EngineState, leave: bool) -> Decision:
    """Note whether the server generates. If it does not and `leave`, take it out of service even if it is up to date:
    waiting work moves to others."""
    by_person = engine.paused and engine.pause_owner == "person"
    cause = f"{PAUSED_BY_PERSON}: waits for POST /resume" if by_person else engine.stuck
    must_step = state.process.must_step or (cause is not None and not by_person)
    state = _process(state, stuck=cause, by_person=by_person, must_step=must_step)
    if cause is None or not leave or state.server.state in (_S.QUARANTINED, _S.DRAINING):
        return state, _NOTHING
    first = (Tell(_S.SYNCING),) if state.server.state in (_S.JOINING, _S.DOWN) else ()
    return _process(state, told_stuck=cause), (*first, *_tell(state, Tell(_S.STALE, reason=cause)))


def _end_attempt(state: MemberState, unproven: Weights | None) -> MemberState:
    """End a publication or a proof, which may have left `unproven` without a verdict."""
    kept = unproven if unproven is not None and not unproven.adapter else state.process.unproven
    return _process(state, attempt=None, unproven=kept)


def _fail(
    state: MemberState, event: Event, version: int, reason: str, tells: tuple[Action, ...] = (), at_once: bool = False
) -> Decision:
    failures = state.process.failures + 1
    wait_s = 0.0 if at_once else retry_pause_s(failures)
    state = _process(state, failures=failures, next_try=event.now + wait_s)
    state = replace(state, waits_for=f"another try of version {version} or newer, in {wait_s:.0f} s: {reason}")
    return _wait(state, (*tells, NoteFailed(version, reason)))


def _wait(state: MemberState, actions: tuple[Action, ...] = ()) -> Decision:
    return replace(state, call="wait"), actions


def _process(state: MemberState, **changes: Any) -> MemberState:
    return replace(state, process=replace(state.process, **changes))
