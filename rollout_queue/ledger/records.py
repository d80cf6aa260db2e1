"""What the queue remembers, in memory and on disk alike: one record a ticket, one for the run.

Records are immutable. A decision is a list of new records; the broker writes it to the store in one transaction and
only then applies it to the ledger, so that memory never runs ahead of the disk.

What the queue goes by of a group, its payload aside: how large it is, and what sampled it.

What the decisions turn down: a reason and a message, no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

import msgspec

from protocol.messages import Fingerprint, Group, Server, SessionStart, TicketKind, VersionSpan
from protocol.status import Evaluation

# Of one server in one group, far above any real one; what is beyond is taken to be one range.
_MAX_RANGES = 32


class SampledBy(msgspec.Struct, frozen=True, array_like=True):
    """Versions that one server sampled of a group, from oldest to newest, both ends included."""

    server: str
    oldest: int
    newest: int


class GroupFacts(msgspec.Struct, frozen=True):
    """What the ledger keeps of a group: its size as submitted, its sampled tokens, and what sampled them: for each
    server the ranges of versions without a gap, as what it sampled before and after a failed proof is good."""

    bytes: int = 0
    tokens: int = 0
    oldest_version: int = 0
    servers: tuple[SampledBy, ...] = ()

    @classmethod
    def of(cls, group: Group, size: int) -> GroupFacts:
        """The facts of a valid group of `size` bytes. A server that is named but sampled no token of it is left out."""
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

    def sampled_within(self, first: int, end: int) -> bool:
        """Whether some token is by a version from `first` up to, and without, `end`."""
        return any(sampled.oldest < end and sampled.newest >= first for sampled in self.servers if first < end)


def _ranges(versions: set[int]) -> list[tuple[int, int]]:
    """The runs of consecutive integers, ascending; the newest ones as one where they are too many."""
    ranges: list[tuple[int, int]] = []
    for version in sorted(versions):
        if ranges and (version == ranges[-1][1] + 1 or len(ranges) == _MAX_RANGES):
            ranges[-1] = (ranges[-1][0], version)
        else:
            ranges.append((version, version))
    return ranges


class TicketState(StrEnum):
    """Where a ticket is. The last three are ends; `TRAINED` ends once a checkpoint holds its step."""

    ISSUED = "issued"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    FORGOTTEN = "forgotten"
    DROPPED = "dropped"
    REISSUED = "reissued"


OUTSTANDING = frozenset({TicketState.ISSUED, TicketState.READY, TicketState.LEASED})

LIVE = OUTSTANDING | {TicketState.TRAINED}

HOLDS_PAYLOAD = frozenset({TicketState.READY, TicketState.LEASED, TicketState.TRAINED})

# TRAINED and FORGOTTEN move back only when a learner resumes from before their step; REISSUED ends otherwise only where
# the run is finished before its row was issued again.
_NEXT: Mapping[TicketState, frozenset[TicketState]] = {
    TicketState.ISSUED: frozenset({TicketState.READY, TicketState.DROPPED, TicketState.REISSUED}),
    TicketState.READY: frozenset({TicketState.LEASED, TicketState.TRAINED, TicketState.DROPPED, TicketState.REISSUED}),
    TicketState.LEASED: frozenset({TicketState.READY, TicketState.TRAINED, TicketState.DROPPED, TicketState.REISSUED}),
    TicketState.TRAINED: frozenset({TicketState.FORGOTTEN, TicketState.READY, TicketState.REISSUED}),
    TicketState.FORGOTTEN: frozenset({TicketState.REISSUED}),
    TicketState.DROPPED: frozenset(),
    TicketState.REISSUED: frozenset({TicketState.DROPPED}),
}


# What the id of an evaluation's ticket begins with; that of a training ticket begins with a digit.
EVAL_TICKET = "e"


class TicketRecord(msgspec.Struct, frozen=True):
    """One ticket and, once it arrived, the group produced for it.

    `serial`: tickets issued before it in this run, a clock that restarts do not turn back. `failures`: attempts at this
    row that failed, without those that a worker gave back as it ended. `version`: the learner's at issue;
    `arrival_version`: the learner's when the group came in.
    `group`: empty until a group was accepted, and stays afterwards. `step`, `trained_version`: of the optimiser step
    that trained it. `reason`: why it ended untrained; a trained one has UNVERIFIED_SERVER if its step was made before
    anybody knew.
    """

    index: int
    attempt: int
    serial: int
    worker_id: str
    version: int
    kind: TicketKind = "train"
    state: TicketState = TicketState.ISSUED
    failures: int = 0
    reason: str | None = None
    lease_id: str | None = None
    group: GroupFacts = GroupFacts()
    arrival_version: int = 0
    step: int | None = None
    trained_version: int | None = None

    @property
    def id(self) -> str:
        return f"{self.index}.{self.attempt}"

    @property
    def was_accepted(self) -> bool:
        return self.group.bytes > 0

    def to(self, state: TicketState, **changes: Any) -> Self:
        """This record in another state; a move that the ledger does not know is a bug and raises."""
        if state not in _NEXT[self.state]:
            raise AssertionError(f"ticket {self.id} cannot go from {self.state} to {state}")
        return msgspec.structs.replace(self, state=state, **changes)


class RunState(msgspec.Struct, frozen=True):
    """The learner's side of the run. `session` counts learner starts and fences the earlier ones.

    `checkpoints`: the steps of those that are kept, oldest first. Tickets of indices below `pruned_below` are kept as
    sums only: no learner can resume from before `pruned_step` any more.
    `declared`: what the session expects of workers; `vocabulary`: ids that its model knows are below it; `data`: what
    the first worker that was let in named, in `data_session`, and later ones where it named nothing.
    `evaluations`: how many were ever asked for, the number of the next one. `sessions`: where those began whose steps
    survive, oldest first, as many as are kept. `given_up`: versions from the first up to the second, of steps that the
    last resume gave up, which are more than queue.max_staleness steps ahead of the weights that it went on with. `id`:
    of this run and of no other, kept from the queue's first start on.
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

    @property
    def all_steps_made(self) -> bool:
        return 0 < self.total_steps <= self.step


class Distrust(msgspec.Struct, frozen=True):
    """Tokens of versions `[version, until_version)` from one server, for tickets before `until_serial`, are not to be
    trained on. None: without end.

    A version label alone cannot tell: the same version may be pushed again, rightly.
    """

    version: int
    until_serial: int | None = None
    until_version: int | None = None


class ServerRecord(msgspec.Struct, frozen=True):
    """A server of the fleet and what it sampled while it failed its proof. `served`: it was proven at least once;
    `proven`: the newest version that was, None before. `restarted_at`: the serial of the first ticket issued since it
    joined again; None once it is proven anew. `removed`: it has left the fleet; what is kept is what its groups, which
    may still come, are judged by. `awaits_verdict`: it drains, and the learner has not said yet what came of the
    version that may have been on its way to it."""

    server: Server
    served: bool = False
    distrust: tuple[Distrust, ...] = ()
    restarted_at: int | None = None
    proven: int | None = None
    removed: bool = False
    awaits_verdict: bool = False


class RowResult(msgspec.Struct, frozen=True):
    """What is kept of the group that an evaluation's row gave.

    rewards, lengths: of its rollouts, lengths in sampled tokens; components: the mean of each reward function;
    finished: rollouts by what ended them; servers: what sampled it.
    """

    rewards: tuple[float, ...]
    components: dict[str, float]
    lengths: tuple[int, ...]
    finished: dict[str, int]
    servers: tuple[SampledBy, ...]


class EvalRowState(StrEnum):
    """Where a row of an evaluation is: with a worker, waiting to be issued again, or at one of its two ends."""

    ISSUED = "issued"
    AGAIN = "again"
    DONE = "done"
    FAILED = "failed"


class EvalRow(msgspec.Struct, frozen=True):
    """A row of an open evaluation that was issued, by its newest ticket. `index`: its number in the data set.

    `worker_id`, `version`: whom it was issued to, and the learner's at that time; `serial`: training tickets issued
    before it, see `TicketRecord`; `failures`: attempts that failed, without those that a worker gave back as it ended.
    """

    evaluation: int
    index: int
    attempt: int
    serial: int
    worker_id: str
    version: int
    state: EvalRowState = EvalRowState.ISSUED
    failures: int = 0
    reason: str | None = None
    result: RowResult | None = None

    @property
    def id(self) -> str:
        """The ticket's."""
        return f"{EVAL_TICKET}{self.evaluation}.{self.index}.{self.attempt}"


class EvalRecord(msgspec.Struct, frozen=True):
    """An evaluation as it was asked for; numbers of evaluations grow, and none is used twice.

    `version`: the lowest that may sample for it; `wanted`: rows, None for all; `rows`: how many they are, None until a
    worker has said how many the data set has; `next_row`: the first that was never issued; `asked_at`: wall time,
    seconds. `result`: None while it is open; an open one's rows have records of their own.
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


class EvalChange(msgspec.Struct, frozen=True):
    """What a decision changes of the evaluations. `removed`: numbers of those that are forgotten; the rows of one that
    has a result are forgotten too."""

    records: tuple[EvalRecord, ...] = ()
    rows: tuple[EvalRow, ...] = ()
    removed: tuple[int, ...] = ()

    @property
    def frees_room(self) -> bool:
        """Whether a worker that was given no ticket may be given one now."""
        return bool(self.records) or any(row.state is not EvalRowState.ISSUED for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.records or self.rows or self.removed)


class Decision(msgspec.Struct, frozen=True):
    """Records that replace the ones before them, all together or not at all."""

    tickets: tuple[TicketRecord, ...] = ()
    run: RunState | None = None
    servers: tuple[ServerRecord, ...] = ()
    evals: EvalChange = EvalChange()

    def __bool__(self) -> bool:
        return bool(self.tickets) or self.run is not None or bool(self.servers) or bool(self.evals)


class StoreContents(msgspec.Struct):
    """What a store holds when the queue starts.

    `live`: tickets that have not ended; `to_reissue`: the ended ones whose row waits to be issued again; `counts`:
    tickets by state; `drops`: dropped ones by reason; `tokens_sampled`: over all groups ever accepted; `eval_rows`: of
    the evaluations that are open.
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
    eval_rows: list[EvalRow] = []


class Refusal(Exception):
    """A request that is turned down: `reason` is a code of `protocol.reasons`, `message` names value and remedy."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
