"""All tools of a task, its own and those of MCP servers, for as long as they are needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TextIO

from protocol.config import RunConfig
from rollout_worker.tools.base import Tool
from rollout_worker.tools.mcp import mcp_tools
from rollout_worker.tools.toolbox import ToolBox
from rollout_worker.user_code import UserCode


@asynccontextmanager
async def open_tools(
    config: RunConfig,
    tools: Sequence[Callable[..., Any] | Tool],
    mcp_servers: Sequence[str],
    code: UserCode,
    errors: TextIO | None = None,
) -> AsyncIterator[ToolBox]:
    """The task's `tools`, and those of its `mcp_servers` and the run file's, connected until the end of the context.
    Servers that are commands run in the task file's folder; `errors`: where they write what goes wrong, None for this
    process's stderr. Raises `ConfigError`."""
    addresses = [*mcp_servers, *config.task.mcp_servers]
    async with mcp_tools(addresses, config.task.file.parent, errors=errors) as found:
        isolated = config.worker.tool_isolation == "process"
        yield ToolBox([*tools, *found], config.worker.tool_timeout_s, code, isolated)
