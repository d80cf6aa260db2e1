"""Offers the tools of MCP servers, over streamable HTTP and stdio.

The `mcp` package is imported with the first server. All traffic with servers runs on an event loop in its own thread,
because reading a long answer must not block the worker's loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

from pydantic import ValidationError

from slipstream.protocol import reasons
from slipstream.protocol.addresses import McpServerAddress, mcp_server
from slipstream.protocol.config import ConfigError
from slipstream.protocol.config.text import nearest
from slipstream.rollout_worker.tools.base import NAME, Content
from slipstream.rollout_worker.tools.mcp_connection import McpFailed, McpServer, shown, taken_note_of
from slipstream.rollout_worker.user_code import UserCodeError
from slipstream.rollout_worker.user_code.values import bounded, encodable

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import ContentBlock


_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0

ENDED_WITHIN_S = 5.0

MAX_TOOLS = 512

# Checking the schema of a tool takes a millisecond a kilobyte, and every prompt would have it.
MAX_SCHEMA_CHARACTERS = 256 * 1024

# Type of a part that the policy cannot be shown.
_LEFT_OUT = "left out"


class McpTool:
    """Calls one tool of an MCP server.

    Attributes:
        schema: JSON schema of the tool, with the parameters as the server gives them.
        see: Opens the images of a result, and blocks; None for a policy that reads text alone.
    """

    see: Callable[[object], Content] | None = None

    def __init__(self, server: McpServer, thread: _LoopThread, name: str, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.origin = f"the MCP server {server.shown}"
        self._server = server
        self._thread = thread
        self._name = name

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> Content:
        began = time.monotonic()
        call = asyncio.ensure_future(self._thread.run(self._server.use(lambda client: self._ask(client, arguments))))
        try:
            await asyncio.wait({call}, timeout=timeout_s)
        finally:
            if not call.done():
                call.cancel()
                call.add_done_callback(taken_note_of)
        if not call.done():
            self._thread.soon(self._server.doubt, began)
            text = f"the MCP server {self._server.shown} gave no answer within {timeout_s:g} s"
            raise UserCodeError(text, reasons.TIMEOUT, None)
        try:
            content: Content = call.result()
            return content
        except UserCodeError:
            raise
        except McpFailed as error:
            raise UserCodeError(str(error), McpFailed.__name__, None) from None
        except Exception as error:  # the library raises many types on an answer that is not MCP
            text = f"the MCP server {self._server.shown}: {_in_a_line(error)}"
            raise UserCodeError(text, type(error).__name__, None) from None

    async def _ask(self, client: Client, arguments: dict[str, Any]) -> Content:
        result = await client.call_tool(self._name, arguments)
        parts = [*map(_part_of, result.content)]
        if (structured := result.structured_content) is not None and not _is_told(parts, structured):
            parts.append({"type": "text", "text": encodable(json.dumps(structured, ensure_ascii=False))})
        if result.is_error:
            text = _text_of(parts)
            text = text or f"the MCP server {self._server.shown} says that the call failed, and not why"
            raise UserCodeError(text, "isError", None)
        if self.see is not None and any(part["type"] == "image" for part in parts):
            shown = [{"type": "text", "text": _note(part)} if part["type"] == _LEFT_OUT else part for part in parts]
            return await asyncio.to_thread(self.see, shown)
        return _text_of(parts)


def check_addresses(addresses: Sequence[str | Mapping[str, Any] | McpServerAddress]) -> None:
    """Check that addresses can be those of MCP servers, without a connection.

    Raises:
        ConfigError: An address is neither a URL nor a command line, nor a mapping with one.
    """
    if isinstance(addresses, str) or not isinstance(addresses, Sequence):
        raise ConfigError(f"Task(mcp_servers={addresses!r:.200}): give a list of URLs or command lines")
    for address in addresses:
        _server(address)


def _server(given: str | Mapping[str, Any] | McpServerAddress) -> McpServerAddress:
    try:
        return mcp_server(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"mcp_servers: {shown(str(given))}: {place}: {first['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"mcp_servers: {error}") from None


@contextlib.asynccontextmanager
async def mcp_tools(
    addresses: Sequence[str | Mapping[str, Any] | McpServerAddress],
    folder: Path,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    errors: TextIO | None = None,
) -> AsyncIterator[list[McpTool]]:
    """Connect to MCP servers until the end of the context, and yield all their tools.

    Args:
        addresses: URLs (streamable HTTP) or command lines (stdio), or `McpServerAddress` or its fields.
        folder: Folder in which command lines run.
        connect_timeout_s: Maximum seconds for a server to connect, and again to list its tools.
        errors: File for the servers' stderr; None for this process's.

    Raises:
        ConfigError: A server cannot be reached or is no MCP server, or the `mcp` package is not installed.
    """
    if not addresses:
        yield []
        return
    if find_spec("mcp") is None:
        raise ConfigError(
            f"mcp_servers = {list(addresses)!r:.200} needs the mcp extra (not installed: mcp): pip install "
            f"'slipstream-rl[mcp]'"
        )
    given = list({(each := _server(address)).address: each for address in addresses}.values())
    thread = _LoopThread()
    servers: list[McpServer] = []
    try:
        servers += await thread.run(_made(given, folder, connect_timeout_s, errors))
        lists = await asyncio.gather(
            *(
                thread.run(_listed(server, each, connect_timeout_s))
                for server, each in zip(servers, given, strict=True)
            ),
            return_exceptions=True,
        )
        for found in lists:
            if isinstance(found, BaseException):
                raise found
        yield [
            McpTool(server, thread, schema["function"]["name"].removeprefix(each.prefix), schema)
            for server, each, schemas in zip(servers, given, lists, strict=True)
            for schema in schemas  # type: ignore[union-attr]
        ]
    finally:
        await asyncio.gather(*(thread.run(server.close()) for server in servers), return_exceptions=True)
        await asyncio.to_thread(thread.end)


class _LoopThread:
    """Runs an event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, daemon=True, name="mcp")
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def soon(self, function: Callable[..., object], *given: object) -> None:
        self._loop.call_soon_threadsafe(function, *given)

    def end(self) -> None:
        """Stop the loop and wait for its thread, at most `ENDED_WITHIN_S` seconds in case it is stuck."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ENDED_WITHIN_S)

    def _main(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _made(
    given: Sequence[McpServerAddress], folder: Path, connect_timeout_s: float, errors: TextIO | None
) -> list[McpServer]:
    """Create the servers on their own loop, and import the library there, because that takes a second."""
    import mcp as _  # noqa: F401

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request
    for transport in ("stdio", "streamable_http", "sse"):  # they log a traceback for each message they cannot read
        logging.getLogger(f"mcp.client.{transport}").setLevel(logging.CRITICAL)
    # It logs each call that is cancelled at a server that reads nothing any more.
    logging.getLogger("mcp.shared.jsonrpc_dispatcher").setLevel(logging.ERROR)
    servers = [
        McpServer(each.address, folder, connect_timeout_s, errors, uses_sse=each.transport == "sse") for each in given
    ]
    for server in servers:
        server.check_program()
    return servers


async def _listed(server: McpServer, given: McpServerAddress, timeout_s: float) -> list[dict[str, Any]]:
    """Connect to a server and return the schemas of the tools that are used, from all pages.

    Raises:
        ConfigError: The server cannot be reached, does not answer in time, or has no usable tools.
    """

    async def listed(client: Client) -> list[dict[str, Any]]:
        schemas: list[dict[str, Any]] = []
        found: set[str] = set()
        cursors: set[str | None] = {None}
        cursor = None
        while True:  # A time-out bounds it.
            page = await client.list_tools(cursor=cursor)
            if page.tools and found.issuperset(tool.name for tool in page.tools):
                return schemas  # some servers give the same page for every cursor
            for tool in page.tools:
                if not NAME.fullmatch(tool.name):
                    _log.warning(
                        "mcp_servers: %s has a tool that is named %.200a, which models cannot write: it is left out; "
                        "names are 1 to 128 ASCII letters, digits, _, - and dots",
                        server.shown,
                        tool.name,
                    )
                    continue
                described = {"name": tool.name, "description": tool.description or tool.title or ""}
                schema = {"type": "function", "function": {**described, "parameters": tool.input_schema}}
                if schema not in schemas:  # pages of some servers overlap
                    schemas.append(schema)
            found.update(tool.name for tool in page.tools)
            if len(schemas) > MAX_TOOLS and not given.include:
                raise ConfigError(
                    f"mcp_servers: {server.shown}: it has more than {MAX_TOOLS} tools, and a prompt has no room for "
                    f"them; have it give fewer, or name those that are needed in include"
                )
            cursor = page.next_cursor
            if cursor in cursors:
                return schemas
            cursors.add(cursor)

    remedy = _remedy(server)
    try:
        await server.connect()
        async with asyncio.timeout(timeout_s):
            schemas: list[dict[str, Any]] = await server.use(listed)
    except TimeoutError:
        text = await server.with_stderr(f"{server.shown} did not list its tools within {timeout_s:g} s")
        raise ConfigError(f"mcp_servers: {text}; {remedy}") from None
    except ConfigError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, McpFailed) else f"{server.shown}: {_in_a_line(error)}"
        raise ConfigError(f"mcp_servers: {text:.500}; {remedy}") from None
    schemas = _chosen(schemas, given, server.shown)
    if not schemas:
        raise ConfigError(f"mcp_servers: {server.shown} has no tools that can be used; leave it out, or fix it")
    return schemas


def _chosen(schemas: Sequence[dict[str, Any]], given: McpServerAddress, shown: str) -> list[dict[str, Any]]:
    """Return the schemas of the tools that are used, under their names for the policy."""
    names = [schema["function"]["name"] for schema in schemas]
    for field, asked in (("include", given.include), ("exclude", given.exclude)):
        for name in asked:
            if name not in names:
                close = nearest(name, names)
                meant = f"did you mean {close}?" if close else f"it has {', '.join(names)}"
                raise ConfigError(f"mcp_servers: {shown} has no tool {name!r}, which {field} names; {meant:.300}")
    chosen = [
        schema
        for schema, name in zip(schemas, names, strict=True)
        if name not in given.exclude and (not given.include or name in given.include)
    ]
    for schema in chosen:
        if (size := len(json.dumps(schema))) > MAX_SCHEMA_CHARACTERS:
            raise ConfigError(
                f"mcp_servers: {shown}: its tool {schema['function']['name']} has a description and schema of {size} "
                f"characters, and a prompt has no room for more than {MAX_SCHEMA_CHARACTERS}; name it in exclude"
            )
    return [
        {**schema, "function": {**schema["function"], "name": given.prefix + schema["function"]["name"]}}
        for schema in chosen
    ]


def _remedy(server: McpServer) -> str:
    """Return what to change if a server gives no list of tools.

    The stderr of a server over HTTP is not on this machine, so only that of a command line is named.
    """
    if server.command:
        return "fix its command line, or look at what it wrote to stderr"
    if not urlsplit(server.shown).path.strip("/"):
        return f"its address has no path, which usually is /mcp: write {server.shown.rstrip('/')}/mcp, or start it"
    return "start it, or fix its address"


def _in_a_line(error: Exception) -> str:
    """Return an error of the library as one line, without pydantic's list of all that a message could have been."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        return f"its answer is none of MCP: {'.'.join(map(str, first['loc']))}: {first['msg']}"[:500]
    return " ".join(f"{type(error).__name__}: {error}"[:500].split())


def _part_of(part: ContentBlock) -> dict[str, Any]:
    """Return a part of a result as one of a message: a text, an image, or one of type `_LEFT_OUT` that says what it
    was."""
    if part.type == "image":
        return {"type": "image", "image": _bytes_of(part.data)}
    if part.type == "resource_link":
        about = "".join(f", {value}" for value in (part.mime_type, part.description) if value)
        return {"type": "text", "text": encodable(f"{part.title or part.name}: {part.uri}{about}")}
    resource = getattr(part, "resource", part)
    uri = getattr(resource, "uri", None)
    if isinstance(text := getattr(resource, "text", None), str):
        return {"type": "text", "text": encodable(text or ("" if uri is None else f"(empty resource {uri})"))}
    return {"type": _LEFT_OUT, "text": part.type if uri is None else f"{part.type} {uri}"}


def _bytes_of(base64_text: str) -> bytes:
    """Decode an image, because a text could name a file of this machine. Returns no bytes for what is no base64."""
    try:
        return base64.b64decode(base64_text)
    except ValueError:
        return b""


def _is_told(parts: Sequence[Mapping[str, Any]], structured: Mapping[str, Any]) -> bool:
    """Return whether texts of a result say what its structured content says.

    Servers give the same as JSON, as protocol and libraries ask for. A value that is no object stands under `result`
    in the structured content, and the items of a list may be one text each.
    """
    texts = [part["text"] for part in parts if part["type"] == "text"]
    same = [structured, structured["result"]] if set(structured) == {"result"} else [structured]
    read = [*map(_json_or_text, texts)]
    return bool(texts) and any(value in (*texts, *read, texts, read) for value in same)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Convert the parts of a result to text.

    Text parts are joined by newlines. Notes at the end name the parts that are not text and were left out.
    """
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return bounded("\n".join([*texts, *(_note(part) for part in parts if part["type"] != "text")]))


def _note(part: Mapping[str, Any]) -> str:
    return encodable(f"({part.get('text', 'image')} left out)")
