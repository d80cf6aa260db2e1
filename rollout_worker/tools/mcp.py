"""Tools of MCP servers, over streamable HTTP and stdio.

The `mcp` package is imported with the first server. The servers are spoken to on a loop in a thread of its own:
reading a long answer must not hold up the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

from protocol import reasons
from protocol.config import ConfigError
from rollout_worker.tools.base import NAME
from rollout_worker.tools.mcp_connection import McpFailed, McpServer, command_of, taken_note_of
from rollout_worker.user_code import UserCodeError
from rollout_worker.user_code.values import encodable

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult


_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0

ENDED_WITHIN_S = 5.0

MAX_TOOLS = 512

# A server whose list of tools never ends is broken.
_MAX_PAGES = 1000


class McpTool:
    """One tool of a server. `schema`: with the parameters as the server gives them."""

    def __init__(self, server: McpServer, thread: _LoopThread, name: str, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.origin = f"the MCP server {server.shown}"
        self._server = server
        self._thread = thread
        self._name = name

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        call = asyncio.ensure_future(self._thread.run(self._server.use(lambda client: self._text(client, arguments))))
        try:
            await asyncio.wait({call}, timeout=timeout_s)
        finally:
            if not call.done():
                call.cancel()
                call.add_done_callback(taken_note_of)
        if not call.done():
            raise UserCodeError(f"no answer within {timeout_s:g} s", reasons.TIMEOUT, None)
        try:
            text: str = call.result()
            return text
        except UserCodeError:
            raise
        except McpFailed as error:
            raise UserCodeError(str(error), McpFailed.__name__, None) from None
        except Exception as error:  # the library, on an answer that is not MCP's
            raise UserCodeError(f"{type(error).__name__}: {error}"[:500], type(error).__name__, None) from None

    async def _text(self, client: Client, arguments: dict[str, Any]) -> str:
        result = await client.call_tool(self._name, arguments)
        text = _text_of(result)
        if result.is_error:
            raise UserCodeError(text, "isError", None)
        return text


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises `ConfigError` for what cannot be an MCP server; connects to none."""
    if isinstance(addresses, str) or not isinstance(addresses, Sequence):
        raise ConfigError(f"Task(mcp_servers={addresses!r:.200}): give a list of URLs or command lines")
    for address in addresses:
        command_of(address)


@contextlib.asynccontextmanager
async def mcp_tools(
    addresses: Sequence[str],
    folder: Path,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    errors: TextIO | None = None,
) -> AsyncIterator[list[McpTool]]:
    """All tools of the servers at `addresses`, connected until the end of the context. Raises `ConfigError` where one
    cannot be reached, or is none."""
    if not addresses:
        yield []
        return
    if find_spec("mcp") is None:
        raise ConfigError(
            f"mcp_servers = {list(addresses)!r:.200} needs the mcp extra (not installed: mcp): pip install "
            f"'slipstream-rl[mcp]'"
        )
    thread = _LoopThread()
    servers: list[McpServer] = []
    try:
        servers += await thread.run(_made(addresses, folder, connect_timeout_s, errors))
        lists = await asyncio.gather(
            *(thread.run(_listed(server, connect_timeout_s)) for server in servers), return_exceptions=True
        )
        for found in lists:
            if isinstance(found, BaseException):
                raise found
        yield [
            McpTool(server, thread, schema["function"]["name"], schema)
            for server, schemas in zip(servers, lists, strict=True)
            for schema in schemas  # type: ignore[union-attr]
        ]
    finally:
        await asyncio.gather(*(thread.run(server.close()) for server in servers), return_exceptions=True)
        await asyncio.to_thread(thread.end)


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, daemon=True, name="mcp")
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def end(self) -> None:
        """Waits for the thread, if it is not stuck."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ENDED_WITHIN_S)

    def _main(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _made(
    addresses: Sequence[str], folder: Path, connect_timeout_s: float, errors: TextIO | None
) -> list[McpServer]:
    """On their loop; the library is imported there too, as that takes a second."""
    import mcp as _  # noqa: F401

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells each request
    servers = [McpServer(address, folder, connect_timeout_s, errors) for address in dict.fromkeys(addresses)]
    for server in servers:
        server.check_program()
    return servers


async def _listed(server: McpServer, timeout_s: float) -> list[dict[str, Any]]:
    """The schemas of all its tools, all pages."""

    async def listed(client: Client) -> list[dict[str, Any]]:
        schemas, cursor = [], None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if not NAME.fullmatch(tool.name):
                    _log.warning(
                        "mcp_servers: %s has a tool that is named %.200a, which models cannot write: it is left out; "
                        "names are 1 to 128 ASCII letters, digits, _, - and dots",
                        server.shown,
                        tool.name,
                    )
                    continue
                described = {"name": tool.name, "description": tool.description or ""}
                schemas.append({"type": "function", "function": {**described, "parameters": tool.input_schema}})
            if len(schemas) > MAX_TOOLS:
                raise McpFailed(
                    f"{server.shown}: it has more than {MAX_TOOLS} tools, and a prompt has no room for "
                    f"them; have it give fewer"
                )
            cursor = page.next_cursor
            if cursor is None:
                return schemas
        raise McpFailed(f"{server.shown}: its list of tools has more than {_MAX_PAGES} pages")

    remedy = _remedy(server)
    try:
        await server.connect()
        async with asyncio.timeout(timeout_s):
            schemas: list[dict[str, Any]] = await server.use(listed)
    except TimeoutError:
        raise ConfigError(
            f"mcp_servers: {server.shown} did not list its tools within {timeout_s:g} s; {remedy}"
        ) from None
    except Exception as error:
        text = str(error) if isinstance(error, McpFailed) else f"{server.shown}: {type(error).__name__}: {error}"
        raise ConfigError(f"mcp_servers: {text:.500}; {remedy}") from None
    if not schemas:
        raise ConfigError(f"mcp_servers: {server.shown} has no tools that can be used; leave it out, or mend it")
    return schemas


def _remedy(server: McpServer) -> str:
    """Where a server gives no list. The stderr of one over HTTP is not here."""
    if server.command:
        return "mend its command line, or look at what it wrote to stderr"
    if not urlsplit(server.shown).path.strip("/"):
        return f"its address has no path, which usually is /mcp: write {server.shown.rstrip('/')}/mcp, or start it"
    return "start it, or mend its address"


def _text_of(result: CallToolResult) -> str:
    """Text parts joined by newlines; structured content as JSON where there is no text, which would say the same; what
    is not text is noted as left out."""
    texts, notes = [], []
    for part in result.content:
        resource = getattr(part, "resource", part)
        if isinstance(text := getattr(resource, "text", None), str):
            texts.append(text)
        else:
            notes.append(f"({part.type} left out)")
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return encodable("\n".join([*texts, *notes]))
