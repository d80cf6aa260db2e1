"""Makes statuses of a queue without a queue."""

from __future__ import annotations

from typing import Any

from protocol.status import GroupCounts, LearnerStatus, Rates, Staleness, Stall, Status, TicketCounts


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
