"""Repairs the messages of an MCP server before the library reads them.

If the library dropped an answer, its call would wait for its whole time-out. In a message that the library cannot read,
half characters are replaced. If it still cannot be read, it becomes an error that answers its call.

The library refuses a whole list for one schema, and a whole result for its structured content. So schemas of results,
which the policy is never shown, are left out, and what many servers write is brought into the protocol's form.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

if TYPE_CHECKING:
    from mcp.client import Transport
    from mcp.shared.message import SessionMessage


@asynccontextmanager
async def repaired(
    transport: Transport, unread: Callable[[str], None], heard: Callable[[float], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Enter the library's transport, and yield its streams with the messages from its server repaired.

    Args:
        transport: The library's transport.
        unread: Is called with each line that is no message.
        heard: Is called with the monotonic time of each message.
    """
    import anyio

    send, receive = anyio.create_memory_object_stream[Any](0)

    async def pass_on(read: Any) -> None:
        async with send:
            async for item in read:
                heard(time.monotonic())
                item = repair(item)
                if isinstance(item, ValidationError):
                    unread(str(item.errors(include_url=False, include_context=False)[0]["input"]))
                with suppress(anyio.BrokenResourceError):
                    await send.send(item)

    async with transport as (read, write), anyio.create_task_group() as tasks:
        tasks.start_soon(pass_on, read)
        yield receive, write
        tasks.cancel_scope.cancel()


def repair(item: SessionMessage | Exception) -> SessionMessage | Exception:
    """Repair a message so that the library accepts it; return it unchanged if that is not possible."""
    from mcp.shared.message import SessionMessage
    from mcp.types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter

    if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse):
        _mend(item.message.result)
    if not isinstance(item, ValidationError):
        return item
    errors = item.errors(include_url=False, include_context=False)
    whole = next((each["input"] for each in errors if isinstance(each["input"], dict)), None)
    with suppress(ValueError, RecursionError):
        if isinstance(line := errors[0]["input"], str):
            whole = json.loads(line)
            text = json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace")
            return repair(SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False)))
    if not isinstance(whole, dict) or "method" in whole or not isinstance(id := whole.get("id"), int):
        return item
    told = ErrorData(code=INTERNAL_ERROR, message=f"its answer cannot be read: {errors[0]['msg']:.200}")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=id, error=told))


def _mend(result: dict[str, Any]) -> None:
    """Bring a list of tools or a tool's result into the protocol's form, in place."""
    tools = result.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            tool.pop("outputSchema", None)
            if isinstance(schema := tool.get("inputSchema"), dict | None):
                tool["inputSchema"] = {"type": "object", **(schema or {})}
    if (structured := result.get("structuredContent")) is not None:
        result.setdefault("content", [])
        if not isinstance(structured, dict):
            result["structuredContent"] = {"result": structured}
