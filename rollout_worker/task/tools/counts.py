"""Calls of tools as a rollout's metrics count them: by tool, and failures by reason too."""

from __future__ import annotations

from rollout_worker.tools.base import OTHER

# A tool's name is part of a metric's: so many are counted by name, all others together.
MOST_COUNTED = 24
NAME_CHARACTERS = 64


def counted_as(name: str, counted: int) -> str:
    """What calls of a tool are counted as, where `counted` others are counted by name."""
    return name[:NAME_CHARACTERS] if counted < MOST_COUNTED else OTHER


def count_call(metrics: dict[str, float], tool: str, reason: str | None, coerced: bool) -> None:
    """`tool`: what it is counted as; reason: why it failed, a code of `protocol.reasons`, None if it did not; coerced:
    its arguments were read although they were not as the schema asks."""
    counts = {"calls": 1, "failures": int(reason is not None)}
    if reason is not None:
        counts[f"failures/{reason}"] = 1
    if coerced:
        counts["coerced"] = 1
    for what, count in counts.items():
        figure = f"tools/{tool}/{what}"
        metrics[figure] = metrics.get(figure, 0.0) + count
