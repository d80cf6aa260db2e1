"""Tools: what the policy may call, and what becomes of a call."""

from rollout_worker.task.tools.base import ArgumentsError, Tool, ToolResult
from rollout_worker.task.tools.box import ToolBox
from rollout_worker.task.tools.counts import MOST_COUNTED
from rollout_worker.task.tools.opening import open_tools

__all__ = ["MOST_COUNTED", "ArgumentsError", "Tool", "ToolBox", "ToolResult", "open_tools"]
