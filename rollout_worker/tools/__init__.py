"""Tools: what the policy may call, and what becomes of a call."""

from __future__ import annotations

from rollout_worker.tools.base import MAX_COUNTED, ArgumentsError, Tool, ToolResult
from rollout_worker.tools.toolbox import ToolBox, open_tools

__all__ = ["MAX_COUNTED", "ArgumentsError", "Tool", "ToolBox", "ToolResult", "open_tools"]
