"""Records of the queue, the same in memory and on disk: tickets, groups, run, servers, evaluations.

Records are immutable. A decision is a list of new records: the broker applies it to memory at once, and tells nobody
of it before the store has it, whole. A decision that declines raises `Refusal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import fsum
from statistics import fmean
from typing import Any, Self

import msgspec

from slipstream.protocol.messages import (
    Fingerprint,
    Group,
    LearnerProcess,
    Server,
    SessionStart,
    TicketKind,
    VersionSpan,
    are_equal,
)
from slipstream.protocol.status import Evaluation

# Ranges of one server in one group, far above any real number. What is beyond is taken as one range.
_MAX_RANGES = 32

# First letter of the id of an evaluation's ticket. That of a training ticket begins with a digit.
EVAL_TICKET = "e"


class SampledBy(msgspec.Struct, frozen=True, array_like=True):
    """A range of versions under which one server sampled tokens of a group; both ends are included."""

    server: str
    oldest: int
    newest: int


class RowOutcome(msgspec.Struct, frozen=True):
    """The rewards of one group, as the estimate of its row takes them.

    Attributes:
        mean: Mean reward.
        variance: Variance of the rewards within the group, of the sample (divided by n - 1); of several roles, the mean
            of theirs. Its expectation is p(1 - p) where rewards are 1 with probability p, else 0.
    """

    mean: float
    variance: float

    @classmethod
    def of(cls, group: Group) -> RowOutcome:
        """Take it from a valid group."""
        variances = []
        for numbers in group.by_role().values():
            rewards = [group.rollouts[number].reward for number in numbers]
            if len(rewards) > 1:
                mean = fmean(rewards)
                squares = fsum((reward - mean) ** 2 for reward in rewards)
                variances.append(0.0 if are_equal(rewards) else squares / (len(rewards) - 1))
        return cls(fmean(rollout.reward for rollout in group.rollouts), fmean(variances) if variances else 0.0)


class RowRecord(msgspec.Struct, frozen=True):
    """The estimate of one row. Floats are those of float32, so that memory and every store hold the same.

    Attributes:
        row: Number of the row, as on tickets.
        tried: Groups of it that were accepted.
        mean: Running mean of its rewards.
        spread: Root of the running mean of the variance within its groups.
    """

    row: int
    tried: int = 0
    mean: float = 0.0
    spread: float = 0.0


class GroupFacts(msgspec.Struct, frozen=True):
    """Facts about a group that the ledger keeps.

    Attributes:
        bytes: Size of its body as submitted.
        tokens: Sampled tokens.
        oldest_version: Version of its oldest sampled token.
        servers: For each server the ranges of versions without a gap: what it sampled before and after a version that
            failed its proof is good.
    """

    bytes: int = 0
    tokens: int = 0
    oldest_version: int = 0
    servers: tuple[SampledBy, ...] = ()

    @classmethod
    def of(cls, group: Group, size: int) -> GroupFacts:
        """Collect the facts of a valid group of `size` bytes. Servers that sampled none of it are left out."""
        spans: dict[str, list[VersionSpan]] = {}
        for rollout in group.rollouts:
            for segment in rollout.segments:
                for span in segment.version_spans:
                    spans.setdefault(group.server_names[span.server], []).append(span)
        servers = tuple(
            SampledBy(name, oldest, newest)
            for name, of_it in sorted(spans.items())
            for oldest, newest in _ranges({span.version for span in of_it})
        )
        return cls(size, group.sampled_tokens, min(sampled.oldest for sampled in servers), servers)

    @property
    def newest(self) -> dict[str, int]:
        """The newest version by which each of its servers sampled it."""
        found: dict[str, int] = {}
        for sampled in self.servers:
            found[sampled.server] = max(sampled.newest, found.get(sampled.server, sampled.newest))
        return found

    def sampled_within(self, first: int, end: int) -> bool:
        """Tell whether some token has a version in `[first, end)`."""
        return any(sampled.oldest < end and sampled.newest >= first for sampled in self.servers if first < end)


def _ranges(versions: set[int]) -> list[tuple[int, int]]:
    """Return the ranges of consecutive integers, ascending. Beyond _MAX_RANGES the last one covers the rest."""
    ranges: list[tuple[int, int]] = []
    for version in sorted(versions):
        if ranges and (version == ranges[-1][1] + 1 or len(ranges) == _MAX_RANGES):
            ranges[-1] = (ranges[-1][0], version)
        else:
            ranges.append((version, version))
    return ranges


class TicketState(StrEnum):
    """State of a ticket. FORGOTTEN, DROPPED, REISSUED and EVALUATED are its ends.

    TRAINED becomes FORGOTTEN once a checkpoint holds its step. EVALUATED is for tickets of evaluations: the group was
    accepted and only its result is kept. `_NEXT` has what a resume, a failed proof or the end of the run changes after
    an end.
    """

    ISSUED = "issued"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    EVALUATED = "evaluated"
    FORGOTTEN = "forgotten"
    DROPPED = "dropped"
    REISSUED = "reissued"


OUTSTANDING = frozenset({TicketState.ISSUED, TicketState.READY, TicketState.LEASED})

LIVE = OUTSTANDING | {TicketState.TRAINED, TicketState.EVALUATED}

HOLDS_PAYLOAD = frozenset({TicketState.READY, TicketState.LEASED, TicketState.TRAINED})

# TRAINED and FORGOTTEN move back only when a learner resumes from before their step. REISSUED becomes DROPPED only if
# the run is finished before its row was issued again. EVALUATED becomes REISSUED if the proof of its weights fails.
_NEXT: Mapping[TicketState, frozenset[TicketState]] = {
    TicketState.ISSUED: frozenset(
        {TicketState.READY, TicketState.EVALUATED, TicketState.DROPPED, TicketState.REISSUED}
    ),
    TicketState.READY: frozenset({TicketState.LEASED, TicketState.TRAINED, TicketState.DROPPED, TicketState.REISSUED}),
    TicketState.LEASED: frozenset({TicketState.READY, TicketState.TRAINED, TicketState.DROPPED, TicketState.REISSUED}),
    TicketState.TRAINED: frozenset({TicketState.FORGOTTEN, TicketState.READY, TicketState.REISSUED}),
    TicketState.EVALUATED: frozenset({TicketState.REISSUED}),
    TicketState.FORGOTTEN: frozenset({TicketState.REISSUED}),
    TicketState.DROPPED: frozenset(),
    TicketState.REISSUED: frozenset({TicketState.DROPPED}),
}


class RowResult(msgspec.Struct, frozen=True):
    """Result of a ticket of an evaluation, kept in place of its group.

    Attributes:
        rewards, lengths: One per rollout; lengths in sampled tokens.
        best: The best reward; of several roles, the mean of each one's best.
        components: Mean of each reward function.
        finished: Number of rollouts by finish reason.
    """

    rewards: tuple[float, ...]
    components: dict[str, float]
    lengths: tuple[int, ...]
    finished: dict[str, int]
    best: float | None = None


class TicketRecord(msgspec.Struct, frozen=True):
    """One ticket and, once accepted, its group.

    Attributes:
        index: Number of the row in the order of the training, or in the eval_dataset.
        serial: Number of training tickets issued before it in this run: a clock that restarts do not turn back. A
            ticket of an evaluation that is out when a server's proof or restart is noted at its serial gets one less.
        version: The learner's version at issue; `arrival_version`, when the group was accepted.
        failures: Failed attempts at this row, without those that a worker gave back as it ended.
        reason: Why it ended untrained. A trained ticket has UNVERIFIED_SERVER if the failed proof became known only
            after its step.
        group: Empty until a group is accepted; kept afterwards.
        step, trained_version: Of the optimiser step that trained it.
        evaluation: Number of its evaluation; None for a training ticket.
        result: Of an evaluated ticket.
        row: Number of the row that was chosen for its index; None where workers map the index to a row.
    """

    index: int
    attempt: int
    serial: int
    worker_id: str
    version: int
    state: TicketState = TicketState.ISSUED
    failures: int = 0
    reason: str | None = None
    lease_id: str | None = None
    group: GroupFacts = GroupFacts()
    arrival_version: int = 0
    step: int | None = None
    trained_version: int | None = None
    evaluation: int | None = None
    result: RowResult | None = None
    row: int | None = None

    @property
    def id(self) -> str:
        row = f"{self.index}.{self.attempt}"
        return row if self.evaluation is None else f"{EVAL_TICKET}{self.evaluation}.{row}"

    @property
    def kind(self) -> TicketKind:
        return "train" if self.evaluation is None else "eval"

    @property
    def was_accepted(self) -> bool:
        return self.group.bytes > 0

    def to(self, state: TicketState, **changes: Any) -> Self:
        """Return this record in another state. A transition that is not allowed is a bug: AssertionError."""
        if state not in _NEXT[self.state]:
            raise AssertionError(f"ticket {self.id} cannot go from {self.state} to {state}")
        return msgspec.structs.replace(self, state=state, **changes)


class RunState(msgspec.Struct, frozen=True):
    """The learner's side of the run.

    Attributes:
        session: Number of learner starts; the newest fences the earlier ones.
        checkpoints: Steps of the checkpoints that are kept, oldest first.
        pruned_below: Tickets with a lower index are kept as sums only; no learner can resume from before `pruned_step`.
        declared: Fingerprint that the session expects of workers.
        vocabulary: Token ids of the session's model are below it.
        data: Data set named by the first admitted worker of `data_session`, completed by later ones.
        evaluations: Evaluations ever asked for, which is the number of the next one.
        sessions: Starts of the sessions whose steps survive, oldest first; only the newest are kept.
        given_up: Versions `[first, end)` of steps that the last resume gave up and that are more than
            queue.max_staleness steps ahead of the weights it resumed with.
        id: Unique id of the run, kept from the queue's first start on.
        learner: The process of the newest session, None if it is not known.
    """

    version: int = 0
    step: int = 0
    total_steps: int = 0
    session: int = 0
    checkpoint_step: int | None = None
    checkpoints: tuple[int, ...] = ()
    pruned_below: int = 0
    pruned_step: int = 0
    finished: bool = False
    staleness_max: int = 0
    declared: Fingerprint | None = None
    vocabulary: int | None = None
    data: Fingerprint | None = None
    data_session: int = 0
    evaluations: int = 0
    sessions: tuple[SessionStart, ...] = ()
    given_up: tuple[int, int] = (0, 0)
    id: str = ""
    learner: LearnerProcess | None = None

    @property
    def all_steps_made(self) -> bool:
        return 0 < self.total_steps <= self.step


class Distrust(msgspec.Struct, frozen=True):
    """Forbids to train tokens of versions `[version, until_version)` of one server, in tickets before `until_serial`.

    None: without end. The version alone does not tell: the same one may be published again and be proven.
    """

    version: int
    until_serial: int | None = None
    until_version: int | None = None


class ServerRecord(msgspec.Struct, frozen=True):
    """A server, and what decides whether its tokens may be trained.

    Attributes:
        served: Whether it was ever proven.
        proven: Newest version proven on it; None before the first.
        restarted_at: Serial of the first ticket issued since it joined again; None once it is proven again.
        removed: It has left the fleet. The record stays, since its groups may still come.
        awaits_verdict: It drains, and the learner has not verified yet the version that may be on its way to it.
    """

    server: Server
    served: bool = False
    distrust: tuple[Distrust, ...] = ()
    restarted_at: int | None = None
    proven: int | None = None
    removed: bool = False
    awaits_verdict: bool = False


class EvalRecord(msgspec.Struct, frozen=True):
    """An evaluation.

    Attributes:
        number: Grows with each evaluation; none is used twice.
        version: Lowest version that may sample for it.
        wanted: Rows asked for; None for all.
        rows: Rows that it has; None until a worker has said how many the data set has.
        next_row: First row that was never issued.
        asked_at: Wall time, seconds.
        result: None while it is open; its tickets are kept until then.
    """

    number: int
    step: int
    version: int
    wanted: int | None
    group_size: int
    temperature: float | None
    timeout_s: float
    asked_at: float
    rows: int | None = None
    next_row: int = 0
    result: Evaluation | None = None


class Decision(msgspec.Struct, frozen=True):
    """New records that replace those before them, all together or not at all.

    Attributes:
        evaluations: An evaluation that has a result ends. Its tickets are forgotten then.
        forgotten: Numbers of evaluations that are forgotten with their tickets.
        rows: Estimates of rows.
    """

    tickets: tuple[TicketRecord, ...] = ()
    run: RunState | None = None
    servers: tuple[ServerRecord, ...] = ()
    evaluations: tuple[EvalRecord, ...] = ()
    forgotten: tuple[int, ...] = ()
    rows: tuple[RowRecord, ...] = ()

    def __bool__(self) -> bool:
        return self != Decision()

    @property
    def trains(self) -> tuple[TicketRecord, ...]:
        """Its tickets of the training."""
        return tuple(record for record in self.tickets if record.evaluation is None)


class StoreContents(msgspec.Struct):
    """Contents of a store when the queue starts.

    Attributes:
        live: Training tickets that have not ended.
        to_reissue: Ended tickets whose rows wait to be issued again.
        counts: Tickets by state.
        drops: Dropped tickets by reason.
        tokens_sampled: Sampled tokens of all groups ever accepted. `tokens_dropped`: of those that were dropped, by
            reason.
        evaluation_tickets: The newest ticket of each row of the open evaluations, ended ones too.
        rows: Estimates of the rows that were tried, by number.
    """

    run: RunState = RunState()
    live: list[TicketRecord] = []
    to_reissue: list[TicketRecord] = []
    next_index: int = 0
    counts: dict[TicketState, int] = {}
    drops: dict[str, int] = {}
    tokens_sampled: int = 0
    servers: list[ServerRecord] = []
    evaluations: list[EvalRecord] = []
    evaluation_tickets: list[TicketRecord] = []
    rows: list[RowRecord] = []
    tokens_dropped: dict[str, int] = {}


class Refusal(Exception):
    """Declines a request. `reason` is a code of `slipstream.protocol.reasons`; `message` names value and remedy."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
