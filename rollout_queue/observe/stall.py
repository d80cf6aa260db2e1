"""The stall alarm (I7): no optimiser step for too long, and the likeliest reason why.

It looks at steps alone. Whether work seems to be in flight or groups come in does not matter: that is how a wedge hides
(F9).

How long no optimiser step was made, and what became of groups since. Arrivals are not progress: a run that drops
every group gets many of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from protocol import reasons
from protocol.messages import Server, ServerState
from protocol.status import GroupCounts, Stall
from rollout_queue.ledger.records import TicketRecord, TicketState

_REMEDIES: Mapping[str, str] = {
    reasons.OVERAGE: "episodes take longer than the learner's steps: raise queue.max_staleness, or lower "
    "rollout.max_episode_tokens",
    reasons.TRUNCATED: "none of their rollouts came to an end, and rollout.mask_truncated is on: raise "
    "rollout.max_episode_tokens, rollout.max_turn_tokens or vllm.max_model_len, or set it to false",
    reasons.UNVERIFIED_SERVER: "a server's weights failed their proof: see its log and weight_sync.probe_tolerance",
    reasons.EXPIRED: "workers die or lose the queue: see their logs and queue.ticket_timeout_s",
    reasons.OUTLIVED: "episodes never end: see the workers' logs and worker.episode_timeout_s",
    reasons.FINGERPRINT: "workers are refused: see the notices",
    reasons.STEP_NOT_FINITE: "loss or gradient is not finite: lower learner.learning_rate, and see left_out.jsonl",
    reasons.OUT_OF_MEMORY: "the learner's memory does not hold a step: lower learner.token_budget",
}


class StallInputs(msgspec.Struct, frozen=True):
    """What the alarm judges by. Times in seconds, `..._ago` None for never; `session` is 0 before the first.

    `quiet_s`: without a step, see `progress`; `alarm_after_s`: T. Since the newest step: `found_full`, groups refused
    for room; `ended`, tickets that ended untrained, by reason. `variance`: what to say of groups without variance;
    `waiting_for_servers`: episodes that wait for one.
    """

    quiet_s: float
    alarm_after_s: float
    stall_after_s: float
    finished: bool
    session: int
    servers: list[Server]
    groups: GroupCounts
    groups_per_step: int
    found_full: int
    ended: Mapping[str, int]
    variance: str
    blocked_by: str | None
    learner_seen_s_ago: float | None
    learner_waits_for: str | None
    worker_seen_s_ago: float | None
    gave_up: str | None = None
    waiting_for_servers: int = 0


def judge(scene: StallInputs) -> Stall:
    """Whether the run stands still, since when, and why."""
    stalled = scene.quiet_s >= scene.alarm_after_s and not scene.finished
    return Stall(stalled, scene.quiet_s, likeliest_cause(scene) if stalled else None, scene.alarm_after_s)


def likeliest_cause(scene: StallInputs) -> str:
    """What is missing first, from the learner's start to the last group."""
    patience = scene.stall_after_s / 2
    if scene.gave_up is not None:
        return scene.gave_up
    if scene.session == 0:
        return "no learner has begun a session: start it with `slipstream learner run.toml`"
    if scene.learner_seen_s_ago is None or scene.learner_seen_s_ago > patience:
        return f"the learner was {_heard(scene.learner_seen_s_ago)}: see its log, restart it with --resume"
    if not any(server.state is ServerState.SERVING for server in scene.servers):
        return (
            f"no vLLM server is serving: {_absent(scene.servers) or 'none is registered'}; see its log, or restart it"
        )
    held = scene.groups.ready + scene.groups.leased
    if lost := _mostly_lost(scene, held):
        return lost
    if held >= scene.groups_per_step:
        if scene.learner_waits_for:
            return (
                f"the learner waits for {scene.learner_waits_for} although {held} groups are there and a step needs "
                f"{scene.groups_per_step}: see its log"
            )
        return (
            f"the learner makes no step although {held} groups are there and a step needs {scene.groups_per_step}: see "
            f"its log; where steps take so long, raise queue.stall_after_s = {scene.stall_after_s:.0f}"
        )
    if scene.found_full:
        return (
            f"{held} groups fill queue.capacity_bytes = {scene.groups.capacity_bytes} and a step needs "
            f"{scene.groups_per_step}: raise it"
        )
    if scene.worker_seen_s_ago is None or scene.worker_seen_s_ago > patience:
        return f"workers were {_heard(scene.worker_seen_s_ago)}: start one with `slipstream worker run.toml`"
    missing = _absent(scene.servers)
    others = f"; of the servers, {missing}" if missing else ""
    if scene.waiting_for_servers:
        return (
            f"{scene.waiting_for_servers} episodes wait for a vLLM server that answers, and those that are called "
            f"serving do not: see the notices and the servers' logs{others}"
        )
    if scene.groups.tickets:
        return f"workers hold {scene.groups.tickets} tickets and submit no group: see their logs and vLLM's{others}"
    if scene.blocked_by:
        return f"no ticket is given: {scene.blocked_by}{others}"
    return f"tickets are free, but the workers ask for none: see their logs{others}"


def _mostly_lost(scene: StallInputs, held: int) -> str | None:
    """The one reason for which most groups ended untrained, if there is one."""
    total = sum(scene.ended.values())
    if total < scene.groups_per_step:
        return None
    reason, count = max(scene.ended.items(), key=lambda item: item[1])
    if 2 * count <= total + held:
        return None
    lost = f"{count} of the {total} groups that ended since the last step were lost to {reason}"
    if reason == reasons.ZERO_VARIANCE:
        return f"{lost}: all their rewards are equal {scene.variance}"
    return f"{lost}: {_REMEDIES.get(reason, 'see the notices and the logs of the workers')}"


def _absent(servers: list[Server]) -> str:
    """The servers that do not serve, each with its state and the reason for it."""
    return ", ".join(
        f"{server.name} is {server.state}{f' ({server.reason})' if server.reason else ''}"
        for server in servers
        if server.state is not ServerState.SERVING
    )


def _heard(seconds_ago: float | None) -> str:
    return "never heard from" if seconds_ago is None else f"last heard from {seconds_ago:.0f} s ago"


_STEPS = 5

_FIRST_STEP = 10

_MAX_REASONS = 64


class StepProgress:
    """The clock of the stall alarm, in seconds. It runs from the newest step; before a session's first one, and before
    the first after a restart of the queue, from the moment at which learner and server are there.

    It stands while they start and while the learner says that it loads, but each for `start_s` at most: from the start,
    or from when the learner that loads was last heard from. What takes longer never comes.
    """

    def __init__(self, now: float, start_s: float) -> None:
        self._start_s = start_s
        self.full = 0
        self.ended: Counter[str] = Counter()
        self.session_began(now)

    def session_began(self, now: float) -> None:
        self._starting, self._loading = True, False
        self._since = now
        self._stands_since: float | None = now
        self._stands_until = now + self._start_s
        self._forget()

    def all_there(self, now: float) -> None:
        """Learner and server are there."""
        if self._starting:
            self._starting = False
            self._since = now
            self._go_on(now)

    def stepped(self, now: float) -> None:
        self._since = now
        self._forget()

    def loads(self, now: float) -> None:
        self._loading = True
        if self._stands_since is None:
            self._stands_since = now
        self._stands_until = now + self._start_s

    def heard(self, now: float) -> None:
        """A sign of life from the learner."""
        if self._loading:
            self._stands_until = now + self._start_s

    def loaded(self, now: float) -> None:
        self._loading = False
        self._go_on(now)

    def found_full(self) -> None:
        """A group was refused for room."""
        self.full += 1

    def tickets_ended(self, records: Iterable[TicketRecord]) -> None:
        for record in records:
            if record.state in (TicketState.DROPPED, TicketState.REISSUED) and record.reason != reasons.ROLLED_BACK:
                known = record.reason in self.ended or len(self.ended) < _MAX_REASONS
                self.ended[record.reason if known and record.reason else "other"] += 1

    def quiet_s(self, now: float) -> float:
        return now - self._since - self._stood_s(now)

    def _go_on(self, now: float) -> None:
        if not self._starting and not self._loading:
            self._since += self._stood_s(now)
            self._stands_since = None

    def _stood_s(self, now: float) -> float:
        if self._stands_since is None:
            return 0.0
        return max(0.0, min(now, self._stands_until) - max(self._since, self._stands_since))

    def _forget(self) -> None:
        self.full = 0
        self.ended.clear()


def alarm_after_s(stall_after_s: float, median_step_s: float | None, trains: bool) -> float:
    """T of the alarm, seconds. `trains`: the learner holds the groups of a step. How long one takes is not known before
    the first, nor after a restart of the queue."""
    if median_step_s is None:
        return stall_after_s * (_FIRST_STEP if trains else 1)
    return max(stall_after_s, _STEPS * median_step_s)
