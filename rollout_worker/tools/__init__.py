"""Offers tools to the policy, runs its calls and returns their results."""

from __future__ import annotations

from slipstream.rollout_worker.tools.base import MAX_COUNTED, ArgumentsError, Tool, ToolResult
from slipstream.rollout_worker.tools.toolbox import ToolBox, open_tools

__all__ = ["MAX_COUNTED", "ArgumentsError", "Tool", "ToolBox", "ToolResult", "open_tools"]
