"""Every message that crosses a process boundary.

Arrays are numpy arrays in memory and little-endian bytes with dtype and length on the wire (see `codec`).
A message that decodes has the right types, nothing more: the queue checks the rules that a group must keep
(`rollout_queue.ledger.validation`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

SCHEMA_VERSION = 2

FinishReason = Literal["stop", "length", "context", "turn_limit", "timeout", "aborted"]
TicketKind = Literal["train", "eval"]
# What the queue stores has 64 bits.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
# Sums, squares and float32 of what is within it stay finite; beyond it a reward or a figure is refused.
MAX_METRIC = 1e30


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[start, end)` of a segment were sampled by policy `version` on the group's `server_names[server]`."""

    version: int
    start: int
    end: int
    server: int


class Segment(msgspec.Struct, forbid_unknown_fields=True):
    """One token sequence as the policy saw it. Arrays may have either byte order; decoded ones are read-only.

    token_ids: int32 [T]; loss_mask: bool [T], true where the token was sampled;
    logprobs: float32 [T], natural log of the sampling distribution (temperature applied) where sampled, 0
    elsewhere; version_spans: cover exactly the sampled tokens, in order.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    version_spans: list[VersionSpan]

    def __post_init__(self) -> None:
        for name, array, dtype in (
            ("token_ids", self.token_ids, np.int32),
            ("loss_mask", self.loss_mask, np.bool_),
            ("logprobs", self.logprobs, np.float32),
        ):
            if array.ndim != 1 or array.dtype.newbyteorder("=") != dtype:
                raise ValueError(
                    f"{name} must be one-dimensional {np.dtype(dtype).name}, "
                    f"is {array.ndim}-dimensional {array.dtype.name}"
                )

    @property
    def sampled_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    def token_versions(self) -> npt.NDArray[np.int64]:
        """Policy version of each token, int64 [T]; -1 where the token was not sampled."""
        versions = np.full(len(self.token_ids), -1, dtype=np.int64)
        for span in self.version_spans:
            versions[span.start : span.end] = span.version
        versions[~self.loss_mask] = -1
        return versions

    def token_servers(self) -> npt.NDArray[np.int32]:
        """Which of the group's `server_names` sampled each token, int32 [T]; 0 where the token was not sampled."""
        servers = np.zeros(len(self.token_ids), dtype=np.int32)
        for span in self.version_spans:
            servers[span.start : span.end] = span.server
        return servers


class Rollout(msgspec.Struct, forbid_unknown_fields=True):
    """The training data of one episode.

    metrics: of the tools that were called `tools/<name>/calls`, `/failures`, `/failures/<reason>` and `/coerced`, and
    figures of the user's, by name; timings: seconds by name (generate, tools, reward, total); messages: UTF-8 JSON of
    the conversation, the prompt's messages first, the middle of a long one left out; opaque to the queue, None where it
    is not kept. extra: what a reward noted for a reader, by name.
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

    @property
    def sampled_tokens(self) -> int:
        return sum(segment.sampled_tokens for segment in self.segments)


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """The rollouts of one prompt: what advantages are computed over and what the queue stores.

    `server_names`: the servers that sampled it, in the order that version spans count them; `started_at`,
    `finished_at`: seconds since the epoch, on the worker's clock; `reward_weights`: of the reward functions, by the
    names of `reward_components`, 1 for one that it does not name.
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

    def versions(self) -> list[int]:
        """Every policy version that sampled a token of this group."""
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
    """What the queue knows of a vLLM server; only `SERVING` ones may be given an episode (I5). A `DRAINING` one leaves:
    the requests on it end, and it is given no other."""

    JOINING = "joining"
    SYNCING = "syncing"
    SERVING = "serving"
    STALE = "stale"
    QUARANTINED = "quarantined"
    DRAINING = "draining"
    DOWN = "down"


# How the reason of a server begins that stands still because a person asked for it: no failure, however long it lasts.
PAUSED_BY_PERSON = "paused by a person"


class Server(msgspec.Struct):
    """A vLLM server in the fleet registry. `version` is the last one proven on it, None before the first; of a
    quarantined server it is the one that failed. `transport`: how weights travel to it, once the learner knows."""

    name: str
    url: str
    state: ServerState = ServerState.JOINING
    version: Natural | None = None
    reason: str | None = None
    changed_at: float = 0.0
    transport: str | None = None


class Ticket(msgspec.Struct):
    """Permission to produce one group. It expires `expires_in_s` after issue or the last heartbeat.

    `seed` is the run's: with it, every worker puts the data set's rows into the same order. `step`: the learner's, at
    issue. Of kind eval, `index` is the number of a row of the evaluation's data set, and `temperature`, if given, is in
    place of the run's.
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


class Fingerprint(msgspec.Struct, frozen=True):
    """What a process takes rollouts to be. Where two differ, groups of the one are wrong data to the other.

    tokenizer, chat: digests of the vocabulary, and of the chat format with its template; rollout: settings that shape
    an episode, as text by name. Of a worker alone: rows of its data set and the digest of a sample of them, the same of
    the rows that evaluations take, and the digest of its task file and its tools' schemas, which may change; libraries:
    versions of those that write prompts, which may differ.
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


class Notice(msgspec.Struct, frozen=True):
    """The first failure of its kind, as a person should read it. `kind`: tool, environment, agent, reward, row, prompt,
    episode, ticket, server, or code, where user code hangs or blocks others; the learner's: checkpoint, batch, server;
    `text`: what failed, with which error, in which file and line."""

    kind: str
    text: str


class TicketRequest(msgspec.Struct):
    """Ask for up to `max_tickets`. `have` names the tickets that the worker holds: one that was issued to it and is
    not among them is delivered again, because the answer was lost or the worker was restarted under its name. None: new
    ones only. `serving`: the servers that it takes to serve; where one of them serves no more, the answer comes at
    once, so that what runs there goes on elsewhere."""

    worker_id: str
    max_tickets: int
    wait_s: float = 30.0
    have: list[str] | None = None
    serving: list[str] = []


class TicketReply(msgspec.Struct):
    """`run`: the run's id, which the labels of its weights begin with."""

    tickets: list[Ticket]
    servers: list[Server]
    run: str = ""


class TicketFailure(msgspec.Struct):
    """Why a worker gives a ticket back; `retryable` false means that another attempt would fail alike."""

    worker_id: str
    reason: str
    detail: str = ""
    retryable: bool = True


class WorkerReport(msgspec.Struct):
    """A worker's heartbeat: renews the tickets named and carries counters, all cumulative since its start.

    `capacity`: slots, episodes that may generate at once; `max_open`: episodes that it may have open. Of those
    `episodes_in_flight`, all that are open now, so many have a slot (`generating`), wait for one (`waiting`), run user
    code (`in_tools`) or are judged (`in_judgement`); the others are over and wait for their group's.
    `waited_s`: seconds that slots were idle because there were no tickets, where one second means all of the slots for
    a second; `full_s`: because no more were to be open; `elapsed_s`: seconds since its first request;
    `cpu_s`: CPU seconds of its process since then; `hung_calls`: calls of user code that were given up and have not
    come back; `waiting_for_servers`: episodes that wait now for a vLLM server that may be asked; `eval_episodes`: of
    evaluations, done or failed, which are in no other count but `failures`, of all kinds by reason. `fingerprint`: what
    the queue accepts or refuses the worker by;
    `troubles`: the first failure of each kind; `draining`: requests that run on each server that it was told drains.
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
    troubles: list[Notice] = []
    draining: dict[str, Natural] = {}


class WorkerReply(msgspec.Struct):
    """Answer to a heartbeat. `lost_tickets` expired or were superseded: their episodes must be cancelled. `warnings`:
    what differs from the run, but does no harm. `run`: as in `TicketReply`."""

    lost_tickets: list[str]
    servers: list[Server]
    finished: bool
    warnings: list[str] = []
    run: str = ""


class LeaseRequest(msgspec.Struct):
    """Ask for up to `max_groups` more groups under `lease_id`, which the learner chooses.

    `have` names the groups of this lease that arrived; one that is leased and not in `have` is delivered again, so that
    a lost answer loses nothing.
    """

    session: int
    lease_id: str
    max_groups: int
    have: list[str] = []
    wait_s: float = 30.0


class LeaseReply(msgspec.Struct):
    """`groups` holds each group's msgpack as it was submitted; `version_at_arrival[i]` is the learner's version
    when group i came in. The lease expires `expires_in_s` after this answer or the last renewal. `revoked`: those of
    `have` that must not be trained, with the reason of each."""

    lease_id: str
    groups: list[msgspec.Raw]
    version_at_arrival: list[int]
    expires_in_s: float
    revoked: dict[str, str] = {}


class LearnerReport(msgspec.Struct):
    """One step's figures for the status page. `step_s`: its seconds, of which `wait_s` waiting for groups;
    `publishing`: the version on its way to the servers, if any; `metrics`: the main ones of the step's line in
    `metrics.jsonl`, by their names there; `troubles`: what went wrong since the step before."""

    step: Natural
    reward_mean: float
    wait_s: float
    step_s: float
    tokens_trained: Natural
    staleness_mean: float
    staleness_max: Natural
    publishing: Natural | None = None
    metrics: dict[str, float] = {}
    troubles: list[Notice] = []


class LeaseAck(msgspec.Struct):
    """End some of a lease's groups: trained at `step`, which made policy `version`, or dropped for a reason.

    With `trained` empty, `step` and `version` are None and only the drops are recorded.
    """

    session: int
    trained: list[str] = []
    dropped: dict[str, str] = {}
    step: Natural | None = None
    version: Natural | None = None
    report: LearnerReport | None = None


class LeaseRenewal(msgspec.Struct):
    """`have`: the lease's groups that the learner is about to train."""

    session: int
    have: list[str] = []


class LeaseRenewed(msgspec.Struct):
    """`revoked`: those of `have` that must not be trained, with the reason of each."""

    revoked: dict[str, str] = {}


class BeginSession(msgspec.Struct, tag="begin", tag_field="do"):
    """The learner starts at step 0, or resumes from a checkpoint of `step` and policy `version`. `fingerprint`: what it
    expects of the workers; `vocabulary`: ids that the model knows are below it."""

    step: Natural
    version: Natural
    total_steps: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    resume: bool
    fingerprint: Fingerprint | None = None
    vocabulary: int | None = None


class Checkpointed(msgspec.Struct, tag="checkpointed", tag_field="do"):
    """A checkpoint of `step` is complete: groups trained up to it may be forgotten."""

    session: int
    step: Natural


class Waiting(msgspec.Struct, tag="waiting", tag_field="do"):
    """The learner says what it waits for, for the status page; `what` None ends the wait. While `what` begins with
    "loading", no step is expected and the stall alarm pauses."""

    session: int
    what: str | None


PolicyCommand = BeginSession | Checkpointed | Waiting


class SessionStart(msgspec.Struct, frozen=True):
    """A learner session went on after `step` steps, with weights that it calls `version`; each step of it adds one."""

    step: int
    version: int


class RunPosition(msgspec.Struct):
    """Where the run stands. `version`: the learner's; `step`: optimiser steps on the surviving time line, version =
    step + offset; `served_version`: lowest version proven on a serving server, None if none serves; `sessions`: those
    that the surviving time line is made of, oldest first, where the queue knows them. `run`: the run's id, the same in
    all of its sessions and no other run's."""

    version: int
    step: int
    total_steps: int
    session: int
    checkpoint_step: int | None
    served_version: int | None
    finished: bool
    sessions: list[SessionStart] = []
    run: str = ""


class FinishRun(msgspec.Struct):
    """The learner has made its last step."""

    session: int


class ServerChange(msgspec.Struct):
    """Register a server or change its state. `session`: the learner's; without it a server can only be registered as
    joining, or reported as down."""

    server: Server
    session: int | None = None


class ErrorBody(msgspec.Struct):
    """Every refusal's body. `reason` is a code of `protocol.reasons`, `message` names the value and the remedy."""

    reason: str
    message: str
