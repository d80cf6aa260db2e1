"""The stall alarm (I7): no group and no step for too long, and the likeliest reason why.

It looks at progress alone. Whether work seems to be in flight does not matter: that is how a wedge hides (F9).
"""

from __future__ import annotations

import msgspec

from protocol.messages import Server, ServerState
from protocol.status import Stall


class Scene(msgspec.Struct, frozen=True):
    """What the alarm judges by; times are seconds ago, None: never."""

    quiet_s: float
    stall_after_s: float
    finished: bool
    session: int
    servers: list[Server]
    tickets: int
    ready: int
    leased: int
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
    """The first link of the chain that is broken, seen from the learner's start to the last group."""
    patience = scene.stall_after_s / 2
    if scene.session == 0:
        return "no learner has begun a session: start it with `slipstream learner run.toml`"
    if scene.learner_seen_s_ago is None or scene.learner_seen_s_ago > patience:
        return f"the learner was last heard {_ago(scene.learner_seen_s_ago)}: see its log, restart it with --resume"
    if not any(server.state is ServerState.SERVING for server in scene.servers):
        states = ", ".join(f"{s.name} is {s.state}{f' ({s.reason})' if s.reason else ''}" for s in scene.servers)
        return f"no vLLM server is serving: {states or 'none is registered'}"
    held = scene.ready + scene.leased
    if held >= scene.groups_per_step:
        doing = f"waits for {scene.learner_waits_for}" if scene.learner_waits_for else "makes no step"
        return f"the learner {doing} while {held} groups are there and a step needs {scene.groups_per_step}"
    if scene.bytes_refused:
        return (
            f"queue.capacity_bytes holds {held} groups and a step needs {scene.groups_per_step}: raise "
            f"queue.capacity_bytes"
        )
    if scene.worker_seen_s_ago is None or scene.worker_seen_s_ago > patience:
        return f"a worker was last heard {_ago(scene.worker_seen_s_ago)}: start one with `slipstream worker run.toml`"
    if scene.tickets:
        return f"workers hold {scene.tickets} tickets and hand in no group: see their failures, tools and vLLM's log"
    if scene.blocked_by:
        return f"no ticket is given: {scene.blocked_by}"
    return "workers are there and tickets are free, but none is asked for: see the workers' logs"


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.0f} s ago"
