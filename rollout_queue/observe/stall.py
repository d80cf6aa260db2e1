"""The stall alarm (I7): raised when no optimiser step was made for too long, with the likeliest cause.

Only steps count as progress. Arrivals do not, nor work in flight: a run that drops every group has plenty of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.status import GroupCounts, Stall
from slipstream.rollout_queue.ledger.records import TicketRecord, TicketState

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
    """Inputs of the stall alarm. Times are in seconds.

    Attributes:
        quiet_s: Time without a step, from `StepProgress.quiet_s`.
        alarm_after_s: The alarm is raised after this time without a step.
        session: The newest learner session, 0 before the first.
        found_full: Groups refused for lack of room since the newest step.
        ended: Tickets that ended untrained since the newest step, by reason.
        why_equal: Why groups have rewards that are all equal.
        learner_seen_s_ago, worker_seen_s_ago: None for never.
        waiting_for_servers: Episodes that wait for a server.
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
    why_equal: str
    blocked_by: str | None
    learner_seen_s_ago: float | None
    learner_waits_for: str | None
    worker_seen_s_ago: float | None
    gave_up: str | None = None
    waiting_for_servers: int = 0


def judge(inputs: StallInputs) -> Stall:
    """Decide whether the run stands still, since when, and why."""
    stalled = inputs.quiet_s >= inputs.alarm_after_s and not inputs.finished
    return Stall(stalled, inputs.quiet_s, likeliest_cause(inputs) if stalled else None, inputs.alarm_after_s)


def likeliest_cause(inputs: StallInputs) -> str:
    """Name the first thing that is missing on the way from the learner's start to the last group of a step."""
    patience = inputs.stall_after_s / 2
    if inputs.gave_up is not None:
        return inputs.gave_up
    if inputs.session == 0:
        return "no learner has begun a session: start it with `slipstream learner run.toml`"
    if inputs.learner_seen_s_ago is None or inputs.learner_seen_s_ago > patience:
        return f"the learner was {_heard(inputs.learner_seen_s_ago)}: see its log, restart it with --resume"
    if not any(server.state is ServerState.SERVING for server in inputs.servers):
        return (
            f"no vLLM server is serving: {_absent(inputs.servers) or 'none is registered'}; see its log, or restart it"
        )
    held = inputs.groups.ready + inputs.groups.leased
    if lost := _mostly_lost(inputs, held):
        return lost
    if held >= inputs.groups_per_step:
        if inputs.learner_waits_for:
            return (
                f"the learner waits for {inputs.learner_waits_for} although {held} groups are there and a step needs "
                f"{inputs.groups_per_step}: see its log"
            )
        return (
            f"the learner makes no step although {held} groups are there and a step needs {inputs.groups_per_step}: "
            f"see its log; where steps take so long, raise queue.stall_after_s = {inputs.stall_after_s:.0f}"
        )
    if inputs.found_full:
        return (
            f"{held} groups fill queue.capacity_bytes = {inputs.groups.capacity_bytes} and a step needs "
            f"{inputs.groups_per_step}: raise it"
        )
    if inputs.worker_seen_s_ago is None or inputs.worker_seen_s_ago > patience:
        return f"workers were {_heard(inputs.worker_seen_s_ago)}: start one with `slipstream worker run.toml`"
    missing = _absent(inputs.servers)
    others = f"; of the servers, {missing}" if missing else ""
    if inputs.waiting_for_servers:
        return (
            f"{inputs.waiting_for_servers} episodes wait for a vLLM server that answers, and those that are called "
            f"serving do not: see the notices and the servers' logs{others}"
        )
    if inputs.groups.tickets:
        return f"workers hold {inputs.groups.tickets} tickets and submit no group: see their logs and vLLM's{others}"
    if inputs.blocked_by:
        return f"no ticket is given: {inputs.blocked_by}{others}"
    return f"tickets are free, but the workers ask for none: see their logs{others}"


def _mostly_lost(inputs: StallInputs, held: int) -> str | None:
    """Describe the reason for which most groups ended untrained, if there is one."""
    total = sum(inputs.ended.values())
    if total < inputs.groups_per_step:
        return None
    reason, count = max(inputs.ended.items(), key=lambda item: item[1])
    if 2 * count <= total + held:
        return None
    lost = f"{count} of the {total} groups that ended since the last step were lost to {reason}"
    if reason == reasons.ZERO_VARIANCE:
        return f"{lost}: all their rewards are equal: {inputs.why_equal}"
    return f"{lost}: {_REMEDIES.get(reason, 'see the notices and the logs of the workers')}"


def _absent(servers: list[Server]) -> str:
    """List the servers that do not serve, each with its state and the reason for it."""
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
    """Measures the time without an optimiser step, and counts what happened to groups meanwhile.

    The time runs from the newest step. Before the first step of a session, and after a restart of the queue, it runs
    from the moment at which there are a learner and a serving server. It stands while these start and while the
    learner says that it loads, each for at most `start_s`: after that nothing is expected to come.

    Args:
        now: Current time, seconds; also in all methods.
        start_s: Maximum time to start, or to load since the learner was last heard from.

    Attributes:
        full: Groups refused for lack of room since the newest step.
        ended: Tickets that ended untrained since the newest step, by reason.
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

    def expect_steps(self, now: float) -> None:
        """Note that there are a learner and a serving server, so that steps can be expected."""
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
        """Note a sign of life from the learner."""
        if self._loading:
            self._stands_until = now + self._start_s

    def loaded(self, now: float) -> None:
        self._loading = False
        self._go_on(now)

    def found_full(self) -> None:
        """Note that a group was refused for lack of room."""
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
    """Return the time without a step after which the alarm is raised, seconds.

    Args:
        stall_after_s: The setting.
        median_step_s: Median time of the newest steps; None before the first, and after a restart of the queue.
        trains: Whether the learner holds the groups of a step. A first step may take long.
    """
    if median_step_s is None:
        return stall_after_s * (_FIRST_STEP if trains else 1)
    return max(stall_after_s, _STEPS * median_step_s)
