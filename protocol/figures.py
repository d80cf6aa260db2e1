"""Names of the figures that a worker counts for each rollout (`Rollout.metrics`), and a learner adds up by name."""

from __future__ import annotations

import re

from protocol import reasons

# Segments after a rollout's first, and times that it went on at another server.
NEW_SEGMENTS = "chat/new_segments"
SERVER_MOVES = "servers/moves"
# Seconds of an episode that its environment took for its reset, its answers and its reward; TRL's names.
ENV_RESET_S, ENV_RESPOND_S, ENV_REWARD_S = "env/reset_s", "env/respond_s", "env/reward_s"
_OURS = (NEW_SEGMENTS, SERVER_MOVES, ENV_RESET_S, ENV_RESPOND_S, ENV_REWARD_S)
# Why a tool's call failed.
WHY_FAILED = (
    reasons.TOOL_UNKNOWN,
    reasons.TOOL_MALFORMED,
    reasons.TOOL_ARGUMENTS,
    reasons.TOOL_RAISED,
    reasons.TIMEOUT,
)
TOOL_COUNT = re.compile(rf"tools/(?P<tool>.+?)/(?P<what>calls|coerced|failures(/({'|'.join(WHY_FAILED)}))?)")


def is_counted(name: str) -> bool:
    """Whether a worker counts under this name, so that a task may not."""
    return name in _OURS or TOOL_COUNT.fullmatch(name) is not None
