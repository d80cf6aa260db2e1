"""What the queue's status says of those that a waiting learner waits for."""

from __future__ import annotations

from protocol.messages import ServerState
from protocol.status import Status

# Three heartbeats of a worker.
SILENT_AFTER_S = 30.0
# The learner names its own waits itself, and servers and workers stand here already.
TOLD = ("learner", "learner's feeder", "the queue")


def waits_of(status: Status, groups_per_step: int) -> str:
    """Servers that do not serve, the groups that are there or in work, the workers' waits; empty if all is well."""
    said = [f"{server.name} is {server.state}" for server in status.servers if server.state is not ServerState.SERVING]
    if not status.servers:
        said.append("no server has registered")
    elif len(said) < len(status.servers):
        groups = status.groups
        said.append(f"{groups.ready + groups.leased} of {groups_per_step} groups, {groups.tickets} in work")
    if not status.workers:
        said.append("no worker is connected")
    said += [
        f"{worker.worker_id} silent for {worker.seen_s_ago:.0f} s"
        for worker in status.workers
        if worker.seen_s_ago > SILENT_AFTER_S
    ]
    told = {*TOLD, *(f"server {server.name}" for server in status.servers)}
    said += [f"{wait.who} waits for {wait.what}, {wait.since_s:.0f} s" for wait in status.waits if wait.who not in told]
    return "; ".join(said)
