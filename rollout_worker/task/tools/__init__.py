"""Tools: what the policy may call, and what becomes of a call."""

from rollout_worker.task.tools.base import Tool
from rollout_worker.task.tools.box import MOST_COUNTED, ToolBox, ToolResult

__all__ = ["MOST_COUNTED", "Tool", "ToolBox", "ToolResult"]
