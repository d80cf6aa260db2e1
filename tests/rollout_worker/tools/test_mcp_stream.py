"""What comes from an MCP server, mended without one: the library drops lines that it cannot read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter
from pydantic import ValidationError

from slipstream.rollout_worker.tools.mcp_stream import repair, repaired


def come(line: str) -> SessionMessage | Exception:
    """A line as the library hands it on."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError as error:
        return error


def answer(result: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": 7, "result": result})


@pytest.mark.parametrize(
    ("result", "read"),
    [
        ({"tools": [{"name": "a"}]}, {"tools": [{"name": "a", "inputSchema": {"type": "object"}}]}),
        (
            {"tools": [{"name": "a", "inputSchema": {"$schema": "s"}, "outputSchema": {"$id": "x"}}, None]},
            {"tools": [{"name": "a", "inputSchema": {"type": "object", "$schema": "s"}}, None]},
        ),
        (
            {"tools": [{"name": "a\ud800", "inputSchema": None}]},
            {"tools": [{"name": "a?", "inputSchema": {"type": "object"}}]},
        ),
        ({"tools": [{"name": "a", "inputSchema": 3}]}, {"tools": [{"name": "a", "inputSchema": 3}]}),
        ({"structuredContent": [{}]}, {"content": [], "structuredContent": {"result": [{}]}}),
        ({"content": [], "structuredContent": None}, {"content": [], "structuredContent": None}),
        ({"tools": 3}, {"tools": 3}),
        ({}, {}),
    ],
)
def test_lists_and_results_are_brought_into_the_protocol_s_form(result: Any, read: Any) -> None:
    item = repair(come(answer(result)))
    assert isinstance(item, SessionMessage)
    assert isinstance(item.message, JSONRPCResponse)
    assert item.message.result == read


def test_half_characters_are_replaced_so_that_the_call_is_answered() -> None:
    item = repair(come(answer({"content": [{"type": "text", "text": "bad \ud800"}]})))
    assert isinstance(item, SessionMessage)
    assert isinstance(item.message, JSONRPCResponse)
    assert (item.message.id, item.message.result["content"][0]["text"]) == (7, "bad ?")


@pytest.mark.parametrize(
    "line",
    [
        '{"jsonrpc": "2.0", "id": 7, "result": {"structuredContent": ' + '{"a":' * 900 + "1" + "}" * 902,
        '{"jsonrpc": "2.0", "id": 7, "result": null}',
        '{"jsonrpc": "2.0", "id": 7, "result": ["text"]}',
        '{"jsonrpc": "2.0", "id": 7, "error": "boom"}',
    ],
)
def test_an_answer_that_cannot_be_read_fails_its_call_at_once(line: str) -> None:
    item = repair(come(line))
    assert isinstance(item, SessionMessage)
    assert isinstance(item.message, JSONRPCError)
    assert item.message.id == 7
    assert item.message.error.message.startswith("its answer cannot be read: ")


@pytest.mark.parametrize(
    "line",
    ["garbage", "{}", '{"jsonrpc": "2.0", "id": 7, "method": 3}', '{"jsonrpc": "2.0", "result": {"id": 3, "a": [}}'],
)
def test_what_answers_no_call_stays_an_error(line: str) -> None:
    assert isinstance(repair(come(line)), ValidationError)


@asynccontextmanager
async def transport(*items: Any) -> AsyncIterator[tuple[Any, Any]]:
    send, receive = anyio.create_memory_object_stream[Any](10)
    for item in items:
        await send.send(item)
    await send.aclose()
    yield receive, send


async def test_lines_that_are_no_message_are_named() -> None:
    unread: list[str] = []
    heard: list[float] = []
    notice = come('{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}')
    given = transport(notice, come("Loading ..."), come(answer({})), ValueError("of the transport"))
    async with repaired(given, unread.append, heard.append) as (stream, _):
        _, line, response, error = [item async for item in stream]
    assert (unread, type(line)) == (["Loading ..."], ValidationError)
    assert len(heard) == 4, "a notice says that the server lives"
    assert isinstance(response, SessionMessage)
    assert isinstance(error, ValueError)
