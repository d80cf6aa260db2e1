"""Opens all tools of a task, its own and those of MCP servers, and runs the calls of an episode.

A failure of a call never raises. It becomes a tool message for the policy, `{"error": ...}`, and is counted by tool
and reason.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO, cast

from jsonschema import SchemaError

from slipstream.protocol import reasons
from slipstream.protocol.addresses import McpServerAddress
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.rollout_worker.chat.parsers.base import MalformedCall, ToolCall
from slipstream.rollout_worker.tools.argument_text import short
from slipstream.rollout_worker.tools.arguments import Parameters
from slipstream.rollout_worker.tools.base import (
    NAME,
    NAME_CHARACTERS,
    ArgumentsError,
    Tool,
    ToolResult,
    as_content,
    counted_as,
)
from slipstream.rollout_worker.tools.function import FunctionTool, GuardedTool, IsolatedCode, is_tool
from slipstream.rollout_worker.tools.mcp import McpTool, mcp_tools
from slipstream.rollout_worker.user_code import UserCode, UserCodeError, failure_of
from slipstream.rollout_worker.user_code.values import encodable
from slipstream.rollout_worker.vision.processor import ImageProcessor, processor_of

DEFAULT_TIMEOUT_S = 60.0

_ID_CHARACTERS = 128

_KNOWN_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class _Entry:
    tool: Tool
    parameters: Parameters
    counted_as: str


class ToolBox:
    """Holds functions and tools by name, and runs calls of them.

    Args:
        tools: Functions and `Tool` objects.
        timeout_s: Maximum seconds of a call.
        code: Runs user code.
        isolated: Whether functions run in child processes.
        images: Opens images that tools return; None for a policy that reads text alone.

    Attributes:
        schemas: JSON schemas of the tools, in order.

    Raises:
        ConfigError: No schema can be made from a function, a schema is invalid, or two tools have the same name.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        code: UserCode | None = None,
        isolated: bool = False,
        images: ImageProcessor | None = None,
    ) -> None:
        self._read = partial(as_content, images=images)
        self._sees = images is not None
        self._code = code or UserCode()
        self._timeout_s = timeout_s
        self._isolated = cast("IsolatedCode", self._code) if isolated else None
        self._tools: dict[str, _Entry] = {}
        made = [self._made(given) for given in tools]
        self.schemas = [tool.schema for tool in made]
        for tool, schema in zip(made, self.schemas, strict=True):
            self._add(tool, schema)

    async def run(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolResult]:
        """Run the calls of a turn and return their results, in the order of the calls.

        Calls run at the same time, except that calls of an environment's methods run one after another.
        """
        if len(calls) == 1:
            return [await self._run(calls[0])]
        results: dict[int, ToolResult] = {}

        async def run(places: Sequence[int]) -> None:
            for place in places:
                results[place] = await self._run(calls[place])

        in_order = [place for place, call in enumerate(calls) if self._runs_in_order(call)]
        alone = [[place] for place in range(len(calls)) if place not in in_order]
        await asyncio.gather(run(in_order), *map(run, alone))
        return [results[place] for place in range(len(calls))]

    def without_nulls(self, prompt: Any) -> Any:
        """Return a row's prompt without the nulls in its calls that the tools' schemas do not allow."""
        if not isinstance(prompt, list):
            return prompt
        return [
            {**message, "tool_calls": [self._without_nulls(call) for call in calls]}
            if isinstance(message, Mapping) and isinstance(calls := message.get("tool_calls"), list)
            else message
            for message in prompt
        ]

    def _without_nulls(self, call: Any) -> Any:
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), Mapping):
            return call
        entry = self._tools.get(str(function.get("name")))
        if entry is None:
            return call
        try:
            function = {**function, "arguments": entry.parameters.without_nulls(arguments)}
        except RecursionError:  # they are shown as they are, or refused
            return call
        return {**call, "function": function} if call.get("function") else function

    def and_tools(self, tools: Sequence[Tool]) -> ToolBox:
        """Return a copy that has these tools too.

        Raises:
            ConfigError: A schema is invalid, or two tools have the same name.
        """
        box = copy.copy(self)
        box._tools, box.schemas = dict(self._tools), list(self.schemas)
        for tool in tools:
            box._add(tool, tool.schema)
            box.schemas.append(tool.schema)
        return box

    def with_each(self, change: Callable[[Tool], Tool]) -> ToolBox:
        """Return a copy with each tool replaced by `change(tool)`.

        The new tool must have the same name and schema, because nothing is checked again.
        """
        box = copy.copy(self)
        box._tools = {name: replace(entry, tool=change(entry.tool)) for name, entry in self._tools.items()}
        return box

    def _runs_in_order(self, call: ToolCall | MalformedCall) -> bool:
        entry = None if isinstance(call, MalformedCall) else self._tools.get(call.name)
        return entry is not None and getattr(entry.tool, "in_order", False)

    def _made(self, given: Any) -> Tool:
        if isinstance(given, FunctionTool | McpTool):
            return given
        if not is_tool(given):
            return FunctionTool(given, self._code, self._isolated)
        if self._isolated is not None:
            raise ConfigError(
                f"worker.tool_isolation = process: a {type(given).__name__} of Task(tools=...) cannot be called in "
                f"another process; give a function, or set thread"
            )
        return GuardedTool(given, self._code)

    def _add(self, tool: Tool, schema: dict[str, Any]) -> None:
        origin = getattr(tool, "origin", type(tool).__name__)
        try:
            name, parameters = schema["function"]["name"], schema["function"].get("parameters", {})
            if not (isinstance(name, str) and NAME.fullmatch(name)):
                raise ConfigError(
                    f"tools: {name!a:.200} from {origin} cannot be a tool's name: models write 1 to 128 ASCII letters, "
                    f"digits, _, - and dots; rename it"
                )
            checked = Parameters(parameters, strict=isinstance(tool, FunctionTool))
            json.dumps(schema, ensure_ascii=False).encode()
        except (SchemaError, KeyError, TypeError, AttributeError, RecursionError, UnicodeEncodeError) as error:
            text = error.message if isinstance(error, SchemaError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"tools: {short(schema)} from {origin} is not a tool's JSON schema: {text:.300}"
            ) from None
        if name in self._tools:
            other = getattr(self._tools[name].tool, "origin", "another")
            choose = ", or set prefix or exclude for the MCP server" if isinstance(tool, McpTool) else ""
            raise ConfigError(
                f"tools: two tools are named {name!r}, one from {other}, one from {origin}; rename one{choose}"
            )
        if isinstance(tool, FunctionTool | GuardedTool):
            tool.read = self._read
        elif isinstance(tool, McpTool) and self._sees:
            tool.see = self._read
        self._tools[name] = _Entry(tool, checked, counted_as(name, len(self._tools)))

    async def _run(self, call: ToolCall | MalformedCall) -> ToolResult:
        if isinstance(call, MalformedCall):
            return ToolResult("tool_call", _error_text(call.reason), reasons.TOOL_MALFORMED)
        id = None if call.id is None else encodable(call.id[:_ID_CHARACTERS])
        entry = self._tools.get(call.name)
        if entry is None:
            name = encodable(call.name[:NAME_CHARACTERS])
            known = ", ".join(self._tools)[:_KNOWN_CHARACTERS] or "none"
            text = _error_text(f"there is no tool {short(name)}; the tools are: {known}")
            return ToolResult(name, text, reasons.TOOL_UNKNOWN, call_id=id)
        result = ToolResult(call.name, "", counted_as=entry.counted_as, call_id=id)
        began = time.perf_counter()
        try:
            arguments = await entry.parameters.fitted(call.arguments, call.as_text)
            result = replace(result, coerced=bool(arguments.repairs))
            result = replace(result, content=await entry.tool.call(arguments.values, self._timeout_s))
        except ArgumentsError as error:
            result = replace(result, content=_error_text(str(error)), reason=reasons.TOOL_ARGUMENTS)
        except Exception as error:
            failure = error if isinstance(error, UserCodeError) else failure_of(error, None)
            reason = reasons.TIMEOUT if failure.kind == reasons.TIMEOUT else reasons.TOOL_RAISED
            result = replace(result, content=_error_text(str(failure)), reason=reason, error=failure)
        return replace(result, seconds=time.perf_counter() - began)


def _error_text(text: str) -> str:
    return encodable(json.dumps({"error": text}, ensure_ascii=False))


@asynccontextmanager
async def open_tools(
    config: RunConfig,
    tools: Sequence[Callable[..., Any] | Tool],
    mcp_servers: Sequence[str | Mapping[str, Any] | McpServerAddress],
    code: UserCode,
    errors: TextIO | None = None,
) -> AsyncIterator[ToolBox]:
    """Open the task's tools, and the tools of its MCP servers and of the run file's.

    The servers stay connected until the end of the context. Servers that are commands run in the task file's folder.

    Args:
        config: The run file.
        tools: The task's functions and `Tool` objects.
        mcp_servers: The task's MCP servers.
        code: Runs user code.
        errors: File for the servers' stderr; None for this process's.

    Raises:
        ConfigError: A server gives no tools, or tools do not fit together.
    """
    addresses = [*mcp_servers, *config.task.mcp_servers]
    async with mcp_tools(addresses, config.task.file.parent, errors=errors) as found:
        isolated = config.worker.tool_isolation == "process"
        yield ToolBox([*tools, *found], config.worker.tool_timeout_s, code, isolated, processor_of(config))
