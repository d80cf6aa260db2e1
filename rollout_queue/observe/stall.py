"""The stall alarm (I7): no group and no step for too long, and the likeliest reason why.

It looks at progress alone. Whether work seems to be in flight does not matter: that is how a wedge hides (F9).
"""

from __future__ import annotations

import msgspec

from protocol.messages import Server, ServerState
from protocol.status import GroupCounts, Stall


class Scene(msgspec.Struct, frozen=True):
    """What the alarm judges by. Times are seconds ago, None for never; `session` is 0 before the first."""

    quiet_s: float
    stall_after_s: float
    finished: bool
    session: int
    servers: list[Server]
    groups: GroupCounts
    groups_per_step: int
    bytes_refused: bool
    blocked_by: str | None
    learner_seen_s_ago: float | None
    learner_waits_for: str | None
    worker_seen_s_ago: float | None


def judge(scene: Scene) -> Stall:
    """Whether the run stands still, since when, and why."""
    stalled = scene.quiet_s >= scene.stall_after_s and not scene.finished
    return Stall(stalled, scene.quiet_s, likeliest_cause(scene) if stalled else None)


def likeliest_cause(scene: Scene) -> str:
    """What is missing first, from the learner's start to the last group."""
    patience = scene.stall_after_s / 2
    if scene.session == 0:
        return "no learner has begun a session: start it with `slipstream learner run.toml`"
    if scene.learner_seen_s_ago is None or scene.learner_seen_s_ago > patience:
        return f"the learner was {_heard(scene.learner_seen_s_ago)}: see its log, restart it with --resume"
    if not any(server.state is ServerState.SERVING for server in scene.servers):
        states = ", ".join(f"{s.name} is {s.state}{f' ({s.reason})' if s.reason else ''}" for s in scene.servers)
        return f"no vLLM server is serving: {states or 'none is registered'}"
    held = scene.groups.ready + scene.groups.leased
    if held >= scene.groups_per_step:
        doing = f"waits for {scene.learner_waits_for}" if scene.learner_waits_for else "makes no step"
        return f"the learner {doing} although {held} groups are there and a step needs {scene.groups_per_step}"
    if scene.bytes_refused:
        return f"{held} groups fill queue.capacity_bytes and a step needs {scene.groups_per_step}: raise it"
    if scene.worker_seen_s_ago is None or scene.worker_seen_s_ago > patience:
        return f"workers were {_heard(scene.worker_seen_s_ago)}: start one with `slipstream worker run.toml`"
    if scene.groups.tickets:
        return f"workers hold {scene.groups.tickets} tickets and submit no group: see their logs and vLLM's"
    if scene.blocked_by:
        return f"no ticket is given: {scene.blocked_by}"
    return "tickets are free, but the workers ask for none: see their logs"


def _heard(seconds_ago: float | None) -> str:
    return "never heard from" if seconds_ago is None else f"last heard from {seconds_ago:.0f} s ago"
