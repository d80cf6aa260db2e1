"""Every message that crosses a process boundary.

Arrays are numpy arrays in memory and little-endian bytes with dtype and length on the wire (see `codec`).
A message that decodes has the right types, no more: the rules that a group must keep are checked by the queue
(`slipstream.rollout_queue.ledger.validation`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.protocol.images import Image, ImagePlace

# Share of the largest by which rewards may differ that are equal: float32's rounding, in which models compute scores.
# It is below any difference that a reward means. No absolute bound: rewards may be of any scale.
EQUAL_WITHIN = 2.0**-22

SCHEMA_VERSION = 3

FinishReason = Literal["stop", "length", "context", "turn_limit", "timeout", "aborted"]
TicketKind = Literal["train", "eval"]
# The queue's store has 64 bits for an integer.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
# Sums, squares and float32 of values up to it stay finite. Rewards and metrics beyond it are refused.
MAX_METRIC = 1e30


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[start, end)` of a segment were sampled by policy `version` on the group's `server_names[server]`."""

    version: int
    start: int
    end: int
    server: int


class RoutedExperts(msgspec.Struct, forbid_unknown_fields=True):
    """The experts of a mixture that servers chose for tokens of a segment.

    Attributes:
        ids: uint8 or uint16 [N * layers * top_k], by token, layer and choice. What stands there for a layer without
            experts means nothing.
        layers: Number of the model's layers.
        top_k: Number of experts that a layer chooses for a token.
        spans: The N tokens, as `[start, end)`, in order.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    layers: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    top_k: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    spans: list[tuple[int, int]]

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype.newbyteorder("=") not in (np.uint8, np.uint16):
            raise ValueError(
                f"ids must be one-dimensional uint8 or uint16, is {self.ids.ndim}-dimensional {self.ids.dtype.name}"
            )

    def by_token(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the ids as [N, layers, top_k]."""
        return self.ids.reshape(-1, self.layers, self.top_k)


def _check_array(name: str, array: npt.NDArray[Any], dtype: type[np.generic]) -> None:
    """Raise `ValueError` for an array of another type or shape. Its byte order does not matter."""
    if array.ndim != 1 or array.dtype.newbyteorder("=") != dtype:
        raise ValueError(
            f"{name} must be one-dimensional {np.dtype(dtype).name}, is {array.ndim}-dimensional {array.dtype.name}"
        )


class SamplingMask(msgspec.Struct, forbid_unknown_fields=True):
    """The tokens that top_k, top_p, min_p and bans left to sample from, for each sampled token of a segment.

    Attributes:
        ids: int32 [M], by sampled token, the sampled one among them.
        counts: uint16 [S], how many of them each of the S sampled tokens has.
    """

    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint16]

    def __post_init__(self) -> None:
        _check_array("ids", self.ids, np.int32)
        _check_array("counts", self.counts, np.uint16)


class TeacherTop(msgspec.Struct, forbid_unknown_fields=True):
    """The k ids that a teacher finds most likely in the place of each of the S sampled tokens of a segment.

    Attributes:
        ids: int32 [S * k], by token.
        logprobs: float32 [S * k], of each, in nats, at temperature 1.
        k: Number of ids of a token.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    k: Annotated[int, msgspec.Meta(ge=1, le=1024)]

    def __post_init__(self) -> None:
        _check_array("ids", self.ids, np.int32)
        _check_array("logprobs", self.logprobs, np.float32)


class Segment(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One token sequence as the policy saw it. Arrays may have either byte order; decoded ones are read-only.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T], true where the token was sampled.
        logprobs: float32 [T], natural log of the sampling distribution (temperature applied) where sampled, 0
            elsewhere.
        version_spans: Cover exactly the sampled tokens, in order.
        experts: Of a mixture, with `learner.router_replay`; None if servers told them for no token.
        images: Where images stand among the tokens, in order.
        sampling_mask: With `rollout.top_k`; None if all tokens could be sampled.
        teacher: float32 [S], log-prob of each of the S sampled tokens under the teacher, in nats, at temperature 1;
            None without a teacher.
        teacher_top: With `teacher.top_k`.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    version_spans: list[VersionSpan]
    experts: RoutedExperts | None = None
    images: list[ImagePlace] = []
    sampling_mask: SamplingMask | None = None
    teacher: npt.NDArray[np.float32] | None = None
    teacher_top: TeacherTop | None = None

    def __post_init__(self) -> None:
        _check_array("token_ids", self.token_ids, np.int32)
        _check_array("loss_mask", self.loss_mask, np.bool_)
        _check_array("logprobs", self.logprobs, np.float32)
        if self.teacher is not None:
            _check_array("teacher", self.teacher, np.float32)

    @property
    def sampled_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    def token_versions(self) -> npt.NDArray[np.int64]:
        """Return the policy version of each token, int64 [T]; -1 where the token was not sampled."""
        versions = np.full(len(self.token_ids), -1, dtype=np.int64)
        for span in self.version_spans:
            versions[span.start : span.end] = span.version
        versions[~self.loss_mask] = -1
        return versions

    def token_servers(self) -> npt.NDArray[np.int32]:
        """Return the index into the group's `server_names` of each token, int32 [T]; 0 where it was not sampled."""
        servers = np.zeros(len(self.token_ids), dtype=np.int32)
        for span in self.version_spans:
            servers[span.start : span.end] = span.server
        return servers


# Roles of a group at most.
MAX_ROLES = 16


class TurnEnd(msgspec.Struct, frozen=True, array_like=True):
    """A turn of the policy ends in segment number `segment`, before its token `end`; it begins where the turn before it
    in that segment ends."""

    segment: int
    end: int


class Rollout(msgspec.Struct, forbid_unknown_fields=True):
    """The training data of one episode.

    Attributes:
        reward_components: Value of each reward function; None where it gave none.
        metrics: Counts of tool calls (`tools/<name>/calls`, `/failures`, `/failures/<reason>`, `/coerced`), and the
            user's own metrics.
        timings: Seconds by name (generate, tools, reward, total).
        messages: UTF-8 JSON of the conversation from the prompt on, the middle of a long one left out. Opaque to the
            queue; None if it is not kept.
        extra: Notes of reward functions for a reader, by name.
        role: The role that the policy played, where an episode has several; unset where it has one.
        turn_ends: Where each turn ends, in the order in which they were sampled; unset unless `learner.credit` or
            `turn_rewards` need it.
        turn_rewards: The reward at each turn, whose sum is `reward`. A reward of the whole rollout is in that of the
            last turn. Unset where no reward was given at a turn.
    """

    segments: list[Segment]
    reward: float
    finish_reason: FinishReason
    reward_components: dict[str, float | None] = {}
    turns: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    metrics: dict[str, float] = {}
    timings: dict[str, float] = {}
    messages: bytes | None = None
    extra: dict[str, str] = {}
    role: str | msgspec.UnsetType = msgspec.UNSET
    turn_ends: list[TurnEnd] | msgspec.UnsetType = msgspec.UNSET
    turn_rewards: list[float] | msgspec.UnsetType = msgspec.UNSET

    @property
    def sampled_tokens(self) -> int:
        return sum(segment.sampled_tokens for segment in self.segments)

    def returns(self, discount: float) -> list[float]:
        """Return the sum of each turn's reward and the later ones, those k turns later times discount^k."""
        found: list[float] = []
        for value in reversed(self.turn_rewards or [*[0.0] * (len(self.turn_ends or ()) - 1), self.reward]):
            found.append(value + discount * (found[-1] if found else 0.0))
        return found[::-1]


def are_equal(rewards: npt.ArrayLike) -> bool:
    """Return whether finite rewards are equal up to the rounding of sums: 0.1 + 0.2 and 0.3 are."""
    values = np.asarray(rewards, dtype=np.float64)
    return values.size < 2 or bool(np.ptp(values) <= EQUAL_WITHIN * np.abs(values).max())


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """The rollouts of one prompt: the unit that advantages are computed over, those of each role by themselves, and
    that the queue stores.

    Attributes:
        server_names: Servers that sampled it; version spans are indices into it.
        started_at, finished_at: Seconds since the epoch, on the worker's clock.
        reward_weights: Weight of each of `reward_components`; 1 for one that is not named.
        images: The images in its segments, each once; unset without images.
    """

    ticket_id: str
    index: int
    epoch: int
    rollouts: list[Rollout]
    worker_id: str
    server_names: list[str]
    started_at: float
    finished_at: float
    schema_version: int = SCHEMA_VERSION
    reward_weights: dict[str, float] = {}
    images: list[Image] | msgspec.UnsetType = msgspec.UNSET

    def by_role(self) -> dict[str, list[int]]:
        """Return the numbers of the rollouts of each role; without roles, all under the empty name."""
        found: dict[str, list[int]] = {}
        for number, rollout in enumerate(self.rollouts):
            found.setdefault(rollout.role or "", []).append(number)
        return found

    @property
    def is_flat(self) -> bool:
        """Whether the rewards of each role are all equal, so that comparing them teaches nothing."""
        return all(
            are_equal([self.rollouts[number].reward for number in numbers]) for numbers in self.by_role().values()
        )

    @property
    def is_taught(self) -> bool:
        """Whether a teacher has scored its tokens, which teaches where rewards are equal, too."""
        return any(segment.teacher is not None for rollout in self.rollouts for segment in rollout.segments)

    @property
    def differs_by_function(self) -> bool:
        """Whether a reward function that counts has told rollouts of a role apart; their sums may be equal."""
        counted = {name for rollout in self.rollouts for name in rollout.reward_components}
        counted = {name for name in counted if self.reward_weights.get(name, 1.0)}
        for numbers in self.by_role().values():
            of_role = [self.rollouts[number].reward_components for number in numbers]
            for name in counted:
                given = [value for components in of_role if (value := components.get(name)) is not None]
                if not are_equal(given):
                    return True
        return False

    def differs_by_turn(self, discount: float) -> bool:
        """Whether returns at some turn tell rollouts of a role apart, where one that has ended has its last return. The
        sums of their rewards may be equal. `discount`: as `learner.credit_discount`."""
        for numbers in self.by_role().values():
            returns = [self.rollouts[number].returns(discount) for number in numbers]
            for turn in range(max(map(len, returns))):
                if not are_equal([each[min(turn, len(each) - 1)] for each in returns]):
                    return True
        return False

    def versions(self) -> list[int]:
        """Return every policy version that sampled a token of this group, ascending."""
        return sorted(
            {
                span.version
                for rollout in self.rollouts
                for segment in rollout.segments
                for span in segment.version_spans
            }
        )

    @property
    def sampled_tokens(self) -> int:
        return sum(rollout.sampled_tokens for rollout in self.rollouts)


class ServerState(StrEnum):
    """State of an inference server. Only SERVING ones get episodes (I5). A DRAINING one finishes its requests."""

    JOINING = "joining"
    SYNCING = "syncing"
    SERVING = "serving"
    STALE = "stale"
    QUARANTINED = "quarantined"
    DRAINING = "draining"
    DOWN = "down"


# First words of the reason of a server that a person has paused. That is no failure, however long it lasts.
PAUSED_BY_PERSON = "paused by a person"


class Proof(msgspec.Struct, frozen=True):
    """Costs of bringing a version to a server, and how near its log-probs came to the learner's.

    Attributes:
        max_abs_diff: Largest difference of a log-prob of the probe, in nats.
        transfer_s: Seconds during generation. `pause_s`: seconds in which generation stood still.
    """

    version: Natural
    max_abs_diff: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    transfer_s: Seconds
    pause_s: Seconds


class Server(msgspec.Struct):
    """An inference server of the registry.

    Attributes:
        version: The last version proven on it, None before the first; of a quarantined server, the one that failed.
        reason: Why it is in its state, for people.
        changed_at: Wall time of the last change, seconds.
        transport: How weights travel to it; None until the learner knows.
        proof: The newest that held; None before the first.
        slow: Why it is slow though it answers or is in a step, with the remedy; None where it is not.
    """

    name: str
    url: str
    state: ServerState = ServerState.JOINING
    version: Natural | None = None
    reason: str | None = None
    changed_at: float = 0.0
    transport: str | None = None
    proof: Proof | None = None
    slow: str | None = None


class Ticket(msgspec.Struct):
    """Permission to produce one group.

    Attributes:
        index: Running index, which every worker maps to the same row; of kind eval, the number of the row itself.
        seed: The run's seed, by which every worker shuffles the data set alike.
        row: Number of the row that the queue chose, counted over the parts of `task.mix` in the order of their names;
            None where workers map the index to a row.
        version, step: The learner's position when the ticket was issued.
        expires_in_s: Time-out from the issue or the last heartbeat, seconds.
        temperature: Replaces the run's in an evaluation; None keeps it.
    """

    id: str
    index: int
    group_size: int
    seed: int
    version: int
    expires_in_s: float
    kind: TicketKind = "train"
    step: Natural = 0
    temperature: float | None = None
    row: Natural | None = None


class Fingerprint(msgspec.Struct, frozen=True):
    """Everything that shapes a process's rollouts. If two differ, groups of the one are wrong data for the other.

    Attributes:
        tokenizer, chat: Digests of the vocabulary, and of the chat format with its template.
        rollout: Settings that shape an episode, as text by name.
        rows, data: Of a worker: number of rows of its data set, and digest of a sample of them.
        parts: Of a worker, with `task.mix`: number of rows of each part.
        eval_rows, eval_data: Of a worker: the same for the eval_dataset.
        task: Of a worker: digest of its task file and its tools' schemas, which may change.
        libraries: Of a worker: versions of the libraries that write prompts, which may differ.
    """

    release: str
    tokenizer: str
    chat: str
    rollout: dict[str, str]
    rows: int | None = None
    data: str | None = None
    eval_rows: int | None = None
    eval_data: str | None = None
    task: str | None = None
    libraries: dict[str, str] = {}
    parts: dict[str, int] = {}


class Notice(msgspec.Struct, frozen=True):
    """Text about the first failure of its kind, for a person.

    Attributes:
        kind: Of a worker: tool, environment, agent, reward, row, prompt, episode, ticket, server, or code where user
            code hangs or blocks others. Of the learner: checkpoint, batch or server.
        text: The failure, with the error, file and line.
    """

    kind: str
    text: str


class TicketRequest(msgspec.Struct):
    """Asks for tickets.

    Attributes:
        max_tickets: Maximum number of tickets.
        wait_s: Time to wait for the first, seconds.
        have: Tickets that the worker holds. Others issued to it are delivered again: an answer was lost, or the worker
            was restarted under its name. None asks for new ones only.
        serving: Servers that the worker believes to serve. If one no longer does, the answer comes at once, so that
            its episodes can continue elsewhere.
        fleet: State of the fleet that the worker knows, from the newest reply; "" for none.
    """

    worker_id: str
    max_tickets: int
    wait_s: float = 30.0
    have: list[str] | None = None
    serving: list[str] = []
    fleet: str = ""


class TicketReply(msgspec.Struct):
    """Answers a request for tickets.

    Attributes:
        servers: The fleet; None if the worker knows it, by the `fleet` that it sent.
        run: The run's id, with which the labels of its weights begin.
        fleet: Names the state of the fleet.
    """

    tickets: list[Ticket]
    servers: list[Server] | None
    run: str = ""
    fleet: str = ""


class TicketFailure(msgspec.Struct):
    """Gives a ticket back with a reason. `retryable`: false if another attempt would fail in the same way."""

    worker_id: str
    reason: str
    detail: str = ""
    retryable: bool = True


class WorkerReport(msgspec.Struct):
    """A worker's heartbeat: renews its tickets and carries counts, which are totals since its start.

    Attributes:
        capacity: Slots, episodes that may generate at once. `max_open`: maximum of open episodes.
        episodes_in_flight: Open episodes. Of these, `episodes_generating` have a slot, `episodes_waiting` wait for one,
            `episodes_in_tools` run user code and `episodes_in_judgement` wait for rewards. The rest are over and wait
            for their group.
        waited_s: Seconds that slots were idle because there were no tickets; all slots for one second are 1 s.
        full_s: The same, because no more episodes were allowed to be open.
        elapsed_s: Seconds since its first request. `cpu_s`: CPU seconds of its process since then.
        hung_calls: Calls of user code that are still running after their time-out.
        waiting_for_servers: Episodes that wait for a server now.
        eval_episodes: Episodes of evaluations, done or failed; in no other count but `failures`.
        failures: Failed episodes of all kinds, by reason.
        fingerprint: Decides whether the queue admits the worker.
        notices: The first failure of each kind.
        draining: Requests that still run on each draining server.
        fleet: As in `TicketRequest`.
    """

    worker_id: str
    ticket_ids: list[str]
    host: str = ""
    pid: int = 0
    capacity: Natural = 0
    max_open: Natural = 0
    episodes_in_flight: Natural = 0
    episodes_generating: Natural = 0
    episodes_waiting: Natural = 0
    episodes_in_tools: Natural = 0
    episodes_in_judgement: Natural = 0
    episodes_done: Natural = 0
    episodes_failed: Natural = 0
    tokens_sampled: Natural = 0
    tool_calls: Natural = 0
    tool_failures: Natural = 0
    requests_retried: Natural = 0
    waited_s: Seconds = 0.0
    full_s: Seconds = 0.0
    elapsed_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    hung_calls: Natural = 0
    waiting_for_servers: Natural = 0
    eval_episodes: Natural = 0
    failures: dict[str, Natural] = {}
    fingerprint: Fingerprint | None = None
    notices: list[Notice] = []
    draining: dict[str, Natural] = {}
    fleet: str = ""


class WorkerReply(msgspec.Struct):
    """Answers a heartbeat.

    Attributes:
        lost_tickets: Expired or superseded tickets, whose episodes must be cancelled.
        warnings: Harmless differences from the run.
        servers, run, fleet: As in `TicketReply`.
    """

    lost_tickets: list[str]
    servers: list[Server] | None
    finished: bool
    warnings: list[str] = []
    run: str = ""
    fleet: str = ""


class LeaseRequest(msgspec.Struct):
    """Asks for up to `max_groups` more groups under a `lease_id` that the learner chooses.

    `have`: groups of this lease that arrived. Other leased ones are delivered again, so that a lost answer loses none.
    """

    session: int
    lease_id: str
    max_groups: int
    have: list[str] = []
    wait_s: float = 30.0


class LeaseReply(msgspec.Struct):
    """Answers a lease.

    Attributes:
        groups: Each group's msgpack as it was submitted.
        version_at_arrival: The learner's version when each group was accepted.
        expires_in_s: Time-out of the lease from this answer or the last renewal, seconds.
        revoked: Groups of `have` that must not be trained, each with its reason.
    """

    lease_id: str
    groups: list[msgspec.Raw]
    version_at_arrival: list[int]
    expires_in_s: float
    revoked: dict[str, str] = {}


class RankReport(msgspec.Struct, frozen=True):
    """One rank of the learner in a step.

    Attributes:
        busy_s: Seconds until its last backward pass, in which the ranks exchange gradients. `wait_s`: by how much the
            slowest rank was busy longer. `step_s`: of the whole step.
        tokens: That it passed through the model.
        memory_bytes: The most that it held: of its GPU in the step, without one of the process since its start.
    """

    rank: Natural
    busy_s: Seconds
    wait_s: Seconds
    step_s: Seconds
    tokens: Natural
    memory_bytes: Natural


class LearnerReport(msgspec.Struct):
    """One step's metrics for the status.

    Attributes:
        step_s: Time of the step, seconds, of which `wait_s` waiting for groups.
        publishing: Version on its way to the servers; None if none is.
        metrics: The main metrics of the step's line in `metrics.jsonl`, by name.
        notices: Failures since the step before.
        ranks: Each rank of the learner; empty if there is one.
    """

    step: Natural
    reward_mean: float
    wait_s: float
    step_s: float
    tokens_trained: Natural
    staleness_mean: float
    staleness_max: Natural
    publishing: Natural | None = None
    metrics: dict[str, float] = {}
    notices: list[Notice] = []
    ranks: list[RankReport] = []


class LeaseAck(msgspec.Struct):
    """Ends some of a lease's groups: trained at `step`, which made policy `version`, or dropped for a reason.

    If nothing was trained, `step` and `version` are None, and only the drops are recorded.
    """

    session: int
    trained: list[str] = []
    dropped: dict[str, str] = {}
    step: Natural | None = None
    version: Natural | None = None
    report: LearnerReport | None = None


class LeaseRenewal(msgspec.Struct):
    """Renews or releases a lease. `have`: the lease's groups that the learner is about to train."""

    session: int
    have: list[str] = []


class LeaseRenewed(msgspec.Struct):
    """Answers a renewal. `revoked`: groups of `have` that must not be trained, each with its reason."""

    revoked: dict[str, str] = {}


class LearnerProcess(msgspec.Struct, frozen=True):
    """The process of a learner session. `started`: seconds since the epoch, which tells it from a later one of this id.

    `seen_s_ago`: seconds since the queue heard from it, None if not since the queue's start.
    """

    host: str
    pid: Natural
    started: float = 0.0
    seen_s_ago: float | None = None


class BeginSession(msgspec.Struct, tag="begin", tag_field="do"):
    """Begins a learner session at step 0, or from a checkpoint of `step` and policy `version`.

    `fingerprint`: the fingerprint that workers must have. `vocabulary`: the model's token ids are below it. `changed`:
    settings that are others than before a resume, for people. `process`: who begins it. `after`: the newest session
    that it knows of; the queue refuses if another process has begun one since. None: it begins in any case.
    """

    step: Natural
    version: Natural
    total_steps: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    resume: bool
    fingerprint: Fingerprint | None = None
    vocabulary: int | None = None
    changed: list[str] = []
    process: LearnerProcess | None = None
    after: int | None = None


class Checkpointed(msgspec.Struct, tag="checkpointed", tag_field="do"):
    """Reports a complete checkpoint of `step`: groups trained up to it may be forgotten."""

    session: int
    step: Natural


class Waiting(msgspec.Struct, tag="waiting", tag_field="do"):
    """Tells the queue what the learner waits for; None ends the wait. While it begins with "loading", the stall alarm
    pauses."""

    session: int
    what: str | None


PolicyCommand = BeginSession | Checkpointed | Waiting


class SessionStart(msgspec.Struct, frozen=True):
    """The start of a learner session: after `step` steps, with weights called `version`. Each step adds one to both."""

    step: int
    version: int


class RunPosition(msgspec.Struct):
    """Position of the run.

    Attributes:
        version: The learner's version, which is step + an offset that grows with each resume.
        step: Optimiser steps on the surviving time line.
        served_version: Lowest version that serves; None if no server serves.
        sessions: Sessions that the surviving time line consists of, oldest first, as far as the queue knows them.
        run: Unique id of the run, the same in all its sessions.
        learner: The process of the newest session, None if it is not known.
    """

    version: int
    step: int
    total_steps: int
    session: int
    checkpoint_step: int | None
    served_version: int | None
    finished: bool
    sessions: list[SessionStart] = []
    run: str = ""
    learner: LearnerProcess | None = None


class FinishRun(msgspec.Struct):
    """Ends the run: the learner has made its last step."""

    session: int


class ServerChange(msgspec.Struct):
    """Registers a server or changes its state. Without the learner's `session` it can only join or be reported down."""

    server: Server
    session: int | None = None


class ErrorBody(msgspec.Struct):
    """Body of every refusal. `reason`: a code of `protocol.reasons`. `message`: names the value and the remedy."""

    reason: str
    message: str
