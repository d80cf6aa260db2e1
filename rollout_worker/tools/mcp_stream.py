"""Repairs the messages of an MCP server before the library reads them.

If the library dropped an answer, its call would wait for its whole time-out. In a line that the library cannot read,
half characters are replaced. If it still cannot be read, it becomes an error that answers its call. Answers with very
many parts are cut. Notifications are dropped, because nothing waits for them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, Transport, TransportStreams
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCMessage

# Bounds the parts of one answer. The library takes seconds for hundreds of thousands.
MAX_PARTS = 1000

# If a message cannot be read, its id is searched in this many characters at each end: servers write it first or last.
_WITHIN = 200

_ID_FIRST = re.compile(r'\s*{[^{\[]*?"id"\s*:\s*(\d{1,15})\s*,')

_ID_LAST = re.compile(r'[\]}]\s*,\s*"id"\s*:\s*(\d{1,15})\s*}\s*$')


class Mended:
    """Wraps a transport and repairs the messages from its server.

    Args:
        transport: The library's transport.
        unread: Is called with each line that is no message.
        heard: Is called with the monotonic time of each message.
    """

    def __init__(self, transport: Transport, unread: Callable[[str], None], heard: Callable[[float], None]) -> None:
        self._transport = transport
        self._unread = unread
        self._heard = heard

    async def __aenter__(self) -> TransportStreams:
        read, write = await self._transport.__aenter__()
        return MendedStream(read, self._unread, self._heard), write

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._transport.__aexit__(*error)


class MendedStream:
    """Yields the repaired messages of a stream. Errors of the transport stay errors."""

    def __init__(
        self,
        stream: ReadStream[SessionMessage | Exception],
        unread: Callable[[str], None],
        heard: Callable[[float], None],
    ) -> None:
        self._stream = stream
        self._unread = unread
        self._heard = heard

    async def receive(self) -> SessionMessage | Exception:
        from mcp.types import JSONRPCNotification
        from pydantic import ValidationError

        while True:
            item = mended(await self._stream.receive())
            self._heard(time.monotonic())
            if isinstance(item, ValidationError):
                self._unread(str(item.errors(include_url=False, include_context=False)[0]["input"]))
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
        """Pass on other attributes, such as `last_context`, which some streams of the library have."""
        return getattr(self._stream, name)


def mended(item: SessionMessage | Exception) -> SessionMessage | Exception:
    """Repair a message so that the library accepts it; return it unchanged if that is not possible."""
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCResponse
    from pydantic import ValidationError

    if isinstance(item, ValidationError):
        errors = item.errors(include_url=False, include_context=False)
        line = errors[0]["input"]
        message = _read(line, errors[0]["msg"]) if isinstance(line, str) and not errors[0]["loc"] else _refused(errors)
        return item if message is None else SessionMessage(message)
    if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse):
        _cut(item.message.result)
    return item


def _read(line: str, why: str) -> JSONRPCMessage | None:
    from mcp.types import jsonrpc_message_adapter

    try:
        text = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        return jsonrpc_message_adapter.validate_json(text, by_name=False)
    except (ValueError, RecursionError):
        pass
    head = line[:_WITHIN].partition('"result"')[0].partition('"error"')[0]
    found = _ID_FIRST.match(head) or _ID_LAST.search(line[-_WITHIN:])
    return None if found is None else _unreadable(int(found[1]), why)


def _refused(errors: Sequence[Mapping[str, Any]]) -> JSONRPCMessage | None:
    """Return an error in place of an answer that is JSON but no answer of JSON-RPC; None if it answers no call."""
    for each in errors:
        whole = each["input"]
        if isinstance(whole, dict) and isinstance(id := whole.get("id"), int) and "method" not in whole:
            return _unreadable(id, "it has neither a result that is an object nor an error with code and message")
    return None


def _unreadable(id: int, why: str) -> JSONRPCMessage:
    from mcp.types import INTERNAL_ERROR, ErrorData, JSONRPCError

    error = ErrorData(code=INTERNAL_ERROR, message=f"its answer cannot be read: {why:.200}")
    return JSONRPCError(jsonrpc="2.0", id=id, error=error)


def _cut(result: dict[str, Any]) -> None:
    parts = result.get("content")
    if isinstance(parts, list) and len(parts) > MAX_PARTS:
        note = {"type": "text", "text": f"({len(parts) - MAX_PARTS} more parts left out)"}
        result["content"] = [*parts[:MAX_PARTS], note]
