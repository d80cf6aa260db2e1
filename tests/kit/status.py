"""Makes statuses of a queue without a queue."""

from __future__ import annotations

from typing import Any

from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import (
    GroupCounts,
    LearnerStatus,
    Rates,
    ServerStatus,
    Staleness,
    Stall,
    Status,
    TicketCounts,
    WorkerStatus,
)


def status(**fields: Any) -> Status:
    """Return the status of a queue that has just started, but for some fields."""
    values: dict[str, Any] = {
        "run": "run",
        "uptime_s": 1.0,
        "version": 0,
        "served_version": None,
        "step": 0,
        "total_steps": 10,
        "checkpoint_step": None,
        "finished": False,
        "max_staleness": 4,
        "depth": 0.0,
        "depth_target": 2.0,
        "groups": GroupCounts(0, 0, 0, 0, 0, 100, 1000, 32),
        "staleness": Staleness(),
        "rates": Rates(),
        "learner": LearnerStatus(),
        "workers": [],
        "servers": [],
        "waits": [],
        "stall": Stall(False, 0.0),
        "ledger": TicketCounts(),
    }
    return Status(**{**values, **fields})


def worker(name: str, **fields: Any) -> WorkerStatus:
    """Return the status of a worker that has done nothing yet, but for some fields."""
    names = ("pid", "capacity", "episodes_done", "episodes_failed", "tokens_sampled", "tool_calls", "tool_failures")
    values: dict[str, Any] = {
        **dict.fromkeys((*names, "episodes_in_flight", "requests_retried"), 0),
        "wait_share": 0.0,
        "cpu_ms_per_episode": None,
        "seen_s_ago": 1.0,
    }
    return WorkerStatus(worker_id=name, host="h", **{**values, **fields})


def server(name: str, state: ServerState, reason: str | None = None) -> ServerStatus:
    """Return the status of a server with version 0."""
    return ServerStatus(name, f"http://{name}", state, 0, reason)
