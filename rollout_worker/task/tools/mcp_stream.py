"""What an MCP server sends, made such that the library takes it: a call whose answer it drops would wait for its whole
time-out.

A line that the library cannot read is read here: half characters are replaced, and what cannot be read even so becomes
an error that answers its call. Answers of very many parts are cut, and notifications, which nobody waits for, go no
further.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, Transport, TransportStreams
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCMessage

# Of one answer; the library takes seconds for hundreds of thousands.
MOST_PARTS = 1000
# The id of a message whose inside cannot be read: servers write it first or last.
_WITHIN = 200
_ID_FIRST = re.compile(r'\s*{[^{\[]*?"id"\s*:\s*(\d{1,15})\s*,')
_ID_LAST = re.compile(r'[\]}]\s*,\s*"id"\s*:\s*(\d{1,15})\s*}\s*$')


class Mended:
    """A transport, with what comes from its server mended."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def __aenter__(self) -> TransportStreams:
        read, write = await self._transport.__aenter__()
        return MendedStream(read), write

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._transport.__aexit__(*error)


class MendedStream:
    """The messages of a stream, mended; an error of the transport stays one."""

    def __init__(self, stream: ReadStream[SessionMessage | Exception]) -> None:
        self._stream = stream

    async def receive(self) -> SessionMessage | Exception:
        from mcp.types import JSONRPCNotification

        while True:
            item = mended(await self._stream.receive())
            if isinstance(item, Exception) or not isinstance(item.message, JSONRPCNotification):
                return item

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> MendedStream:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        from anyio import EndOfStream

        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> MendedStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __getattr__(self, name: str) -> Any:
        """`last_context`, which some streams of the library have."""
        return getattr(self._stream, name)


def mended(item: SessionMessage | Exception) -> SessionMessage | Exception:
    """A message that the library takes, if one can be made of it."""
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCResponse
    from pydantic import ValidationError

    if isinstance(item, ValidationError):
        first = item.errors(include_url=False, include_context=False)[0]
        message = _read(first["input"], first["msg"]) if isinstance(first["input"], str) else None
        return item if message is None else SessionMessage(message)
    if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse):
        _cut(item.message.result)
    return item


def _read(line: str, why: str) -> JSONRPCMessage | None:
    from mcp.types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

    try:
        text = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        return jsonrpc_message_adapter.validate_json(text, by_name=False)
    except (ValueError, RecursionError):
        pass
    head = line[:_WITHIN].partition('"result"')[0].partition('"error"')[0]
    found = _ID_FIRST.match(head) or _ID_LAST.search(line[-_WITHIN:])
    if found is None:
        return None
    error = ErrorData(code=INTERNAL_ERROR, message=f"its answer cannot be read: {why:.200}")
    return JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=error)


def _cut(result: dict[str, Any]) -> None:
    parts = result.get("content")
    if isinstance(parts, list) and len(parts) > MOST_PARTS:
        note = {"type": "text", "text": f"({len(parts) - MOST_PARTS} more parts left out)"}
        result["content"] = [*parts[:MOST_PARTS], note]
