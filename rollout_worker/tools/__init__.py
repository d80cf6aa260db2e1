"""Tools: what the policy may call, and what becomes of a call."""

from __future__ import annotations

from rollout_worker.task.tools.counts import MOST_COUNTED
from rollout_worker.task.tools.opening import open_tools
from rollout_worker.tools.base import ArgumentsError, Tool, ToolResult
from rollout_worker.tools.toolbox import ToolBox

__all__ = ["MOST_COUNTED", "ArgumentsError", "Tool", "ToolBox", "ToolResult", "open_tools"]
