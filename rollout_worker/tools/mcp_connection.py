"""Connects to one MCP server when a call needs it, and again after the connection was lost.

All code here runs on the loop of `tools/mcp.py`, which is not the worker's. One task, the owner, enters and leaves a
connection, as the library requires. Calls run next to the owner and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit, urlunsplit

from slipstream.protocol import access
from slipstream.protocol.addresses import mcp_command
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.tools.mcp_stderr import StderrTail
from slipstream.rollout_worker.tools.mcp_stream import repaired
from slipstream.rollout_worker.user_code.process_guard import guarded_command
from slipstream.rollout_worker.user_code.values import without_middle

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport

_log = logging.getLogger(__name__)

# For this time after a failed connection calls fail at once. Otherwise each call would start a process.
RETRY_AFTER_S = 1.0

# Bounds the end of a server, with the time before and after its processes get signals.
_CLOSED_WITHIN_S = 10.0

# A server that was silent for a whole call and does not answer a ping within this time is given up.
PING_WITHIN_S = 5.0

_HTTP_CONNECT_S = 30.0

_FOREVER_S = 1e6

_MAX_EVENT_BYTES = 64 * 1024 * 1024

_SHOWN_CHARACTERS = 120

_STDERR_CHARACTERS = 300

_ANSWER_CHARACTERS = 2000


class McpFailed(Exception):
    """Is raised when a call or a connection fails. Its text says why."""


class McpServer:
    """Runs work on one MCP server, over a connection that its calls share.

    Args:
        address: URL (streamable HTTP) or command line (stdio).
        folder: Folder in which a command line runs.
        connect_timeout_s: Maximum seconds to connect.
        errors: File for the server's stderr; None for this process's.
        clock: Returns monotonic seconds.
        uses_sse: Whether a URL is spoken to over SSE.

    Raises:
        ConfigError: The address cannot be that of a server.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        connect_timeout_s: float,
        errors: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        uses_sse: bool = False,
    ) -> None:
        self._uses_sse = uses_sse
        self.shown = shown(address)
        self.command = command_of(address)
        self._address = address
        self._folder = folder
        self._connect_timeout_s = connect_timeout_s
        self._errors = errors
        self._clock = clock
        self._opening: asyncio.Task[_Connection] | None = None
        self._connection: _Connection | None = None
        # All whose owner may still run, retired ones too.
        self._connections: list[_Connection] = []
        self._failure, self._again_at = "", -float("inf")
        self._told: set[str] = set()
        self._pinging: asyncio.Task[None] | None = None
        # Of the last answer over HTTP.
        self._status: int | None = None
        # Of the newest process.
        self._stderr: StderrTail | None = None

    async def connect(self) -> None:
        """Connect, unless a connection is open.

        Raises:
            McpFailed: The server cannot be reached.
        """
        await self._connected()

    async def use(self, work: Callable[[Client], Awaitable[Any]]) -> Any:
        """Run `work` with the connected client and return its result.

        Raises:
            McpFailed: The server cannot be reached, goes away, or answers with an error.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND, PARSE_ERROR

        # Errors of the call itself. Any other is of the session, and servers use many codes for one that they do not
        # know any more, such as after a restart: the call was not made then.
        of_call = (INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND)
        for is_last in (False, True):
            connection = await self._connected()
            try:
                return await connection.run(work)
            except MCPError as error:
                if error.code not in of_call:
                    self._give_up(connection)
                if error.code == CONNECTION_CLOSED:
                    lost = f"the connection to the MCP server {self.shown} was lost: {error}"
                    raise McpFailed(await self.with_stderr(lost)) from None
                if is_last or error.code in (*of_call, PARSE_ERROR):
                    answer = self._with_status(without_middle(str(error), _ANSWER_CHARACTERS))
                    raise McpFailed(f"the MCP server {self.shown} answered: {answer}") from None
            except McpFailed as error:
                self._give_up(connection)
                raise McpFailed(await self.with_stderr(str(error))) from None
        raise AssertionError("the last try has an end")

    def doubt(self, since: float) -> None:
        """Begin to ping the server unless it was heard from. If it does not answer, its connection is given up.

        Args:
            since: Monotonic time at which a call began that was not answered in time.
        """
        connection = self._connection
        if connection is None or not connection.lives or connection.heard_at > since:
            return
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.create_task(self._ping(connection))
            self._pinging.add_done_callback(taken_note_of)

    async def _ping(self, connection: _Connection) -> None:
        began = time.monotonic()
        # An error is an answer too: newer servers know no ping. A lost connection is found out by the next call.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(PING_WITHIN_S):
                await connection.run(lambda client: client.session.send_ping())
        if not connection.lives or connection.heard_at > began:
            return
        self._give_up(connection)
        then = "starts its command line again" if self.command else "connects to it again"
        self._warn_once(
            f"hangs: it answered neither a call in time nor a ping within {PING_WITHIN_S:g} s; the next call {then}"
        )

    async def close(self) -> None:
        waiting = [task for task in (self._pinging, self._opening) if task is not None]
        for each in waiting:
            each.cancel()
        if waiting:
            await asyncio.wait(waiting)
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _connected(self) -> _Connection:
        if self._connection is not None and self._connection.lives:
            return self._connection
        if self._opening is None:
            if self._clock() < self._again_at:
                raise McpFailed(self._failure)
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(taken_note_of)
        # Calls that wait at the same time share this connection, so it must open even if the first call is cancelled.
        return await asyncio.shield(self._opening)

    async def _open(self) -> _Connection:
        connection = _Connection(self._transport, self.shown, self._warn_of_unread)
        self._status = None
        try:
            await connection.open(self._connect_timeout_s)
            self._connection = connection
            self._connections = [*(each for each in self._connections if not each.ended), connection]
            return connection
        except McpFailed as error:
            self._failure = await self.with_stderr(self._with_status(str(error)))
            self._again_at = self._clock() + RETRY_AFTER_S
            raise McpFailed(self._failure) from None
        finally:
            self._opening = None
            if self._stderr is not None:
                self._stderr.file.close()  # the process has its own

    async def with_stderr(self, text: str) -> str:
        """Return an error with what a process wrote last."""
        lines = "" if self._stderr is None else await asyncio.to_thread(self._stderr.last_lines)
        return f"{text}; it wrote last: {lines[-_STDERR_CHARACTERS:]}" if lines else text

    async def _note_status(self, response: Any) -> None:
        """Keep the status of a refused message, which the library's errors do not say."""
        if response.request.method == "POST":
            self._status = response.status_code

    def _with_status(self, text: str) -> str:
        if self._status is None or self._status < 400:
            return text
        remedy = (
            "; what it asks for can stand in its address, as a key or user:password@" if self._status == 401 else ""
        )
        return f"{text} (HTTP status {self._status}{remedy})"

    def _warn_of_unread(self, line: str) -> None:
        what = "writes to stdout what is no message of MCP"
        self._warn_once(what, f": {line[:100]!a}: it is left out; have it write that to stderr")

    def _warn_once(self, what: str, more: str = "") -> None:
        if what not in self._told:
            self._told.add(what)
            _log.warning("mcp_servers: %s %s%s (not told again)", self.shown, what, more)

    def _give_up(self, connection: _Connection) -> None:
        connection.retire()
        if self._connection is connection:
            self._connection = None

    def _transport(self, stack: contextlib.AsyncExitStack) -> Transport:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self._uses_sse:
            from mcp.client.sse import sse_client

            # The caller bounds the time of a call; a server may be silent for as long as nobody calls.
            return sse_client(self._address, timeout=_HTTP_CONNECT_S, sse_read_timeout=_FOREVER_S)
        if not self.command:
            import httpx2

            # httpx2's own limit of 100 calls at a time would end the connection. The caller bounds the time of a call.
            client = httpx2.AsyncClient(
                timeout=httpx2.Timeout(None, connect=_HTTP_CONNECT_S),
                limits=httpx2.Limits(max_connections=None),
                event_hooks={"response": [self._note_status]},
            )
            stack.push_async_callback(client.aclose)
            # An image of a megabyte exceeds the library's own limit, which ends the connection.
            return streamable_http_client(self._address, http_client=client, max_sse_event_size=_MAX_EVENT_BYTES)
        program, *arguments = guarded_command(self.command)
        parameters = StdioServerParameters(
            command=program,
            args=arguments,
            env=access.environment_without_token(os.environ),
            cwd=self._folder,
            encoding_error_handler="replace",
        )
        self._stderr = StderrTail(self._errors or sys.stderr)
        return stdio_client(parameters, self._stderr.file)

    def check_program(self) -> None:
        """Check that the program of a command line exists.

        Raises:
            ConfigError: There is no such program.
        """
        if not self.command:
            return
        program = self.command[0]
        path = self._folder / program if os.sep in program else program
        if shutil.which(path) is None:
            raise ConfigError(
                f"task.mcp_servers: {self.shown}: there is no program {program!r} in {self._folder} or on the PATH; "
                f"install it, or write its whole path"
            )


class _Connection:
    """Holds one connection from its opening to its end.

    Attributes:
        lives: Whether calls may still begin.
        heard_at: Monotonic time of the server's last message.
    """

    heard_at = -float("inf")

    def __init__(
        self,
        transport: Callable[[contextlib.AsyncExitStack], Transport],
        shown: str,
        unread: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._shown = shown
        self._unread = unread
        self._leave = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._owner: asyncio.Task[None] | None = None
        self._running = 0
        self._retired = False

    @property
    def lives(self) -> bool:
        return not self._retired and self._owner is not None and not self._owner.done()

    @property
    def ended(self) -> bool:
        return self._owner is None or self._owner.done()

    async def open(self, timeout_s: float) -> None:
        """Open the connection. If this fails, the owner is cancelled.

        Args:
            timeout_s: Maximum seconds to connect.

        Raises:
            McpFailed: The server cannot be reached, or did not answer in time.
        """
        self._owner = asyncio.create_task(self._own())
        self._owner.add_done_callback(taken_note_of)
        either: list[asyncio.Future[Any]] = [self._owner, self._ready]
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return
            if self._owner.done():
                raise McpFailed(f"the MCP server {self._shown} cannot be reached: {self._end()}")
            raise McpFailed(f"the MCP server {self._shown} did not answer within {timeout_s:g} s")
        finally:
            if not self._ready.done():
                self._owner.cancel()
                await asyncio.wait([self._owner], timeout=_CLOSED_WITHIN_S)

    async def run(self, work: Callable[[Client], Awaitable[Any]]) -> Any:
        """Run `work` with the client and return its result. Exceptions of `work` propagate.

        Raises:
            McpFailed: The connection ended first.
        """
        assert self._owner is not None
        call = asyncio.ensure_future(work(self._ready.result()))
        self._running += 1
        try:
            await asyncio.wait({call, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            if call.done() and not call.cancelled():
                return call.result()
            raise McpFailed(f"the connection to the MCP server {self._shown} was lost: {self._end()}")
        finally:
            if not call.done():
                call.cancel()
                call.add_done_callback(taken_note_of)
            self._running -= 1
            if self._retired and not self._running:
                self._leave.set()

    def retire(self) -> None:
        """Let no new call begin, and close the connection when the last call is done."""
        self._retired = True
        if not self._running:
            self._leave.set()

    async def close(self) -> None:
        self._retired = True
        self._leave.set()
        if self._owner is not None and not self._owner.done():
            await asyncio.wait({self._owner}, timeout=_CLOSED_WITHIN_S)
            self._owner.cancel()

    async def _own(self) -> None:
        from mcp import Client

        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                Client(repaired(self._transport(stack), self._unread, self._hear), cache=None)
            )
            if not self._ready.done():
                self._ready.set_result(client)
            await self._leave.wait()

    def _hear(self, at: float) -> None:
        self.heard_at = at

    def _end(self) -> str:
        """Return in words why the owner ended."""
        if self._owner is None or not self._owner.done() or self._owner.cancelled():
            return "it was closed"
        error = self._owner.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return "it was closed" if error is None else f"{type(error).__name__}: {error}"[:300]


def taken_note_of(task: asyncio.Future[Any]) -> None:
    """Read a task's exception, so that asyncio does not log it as never retrieved.

    Its caller may no longer wait for it.
    """
    if not task.cancelled():
        task.exception()


def command_of(address: str) -> list[str]:
    """Split a command line into words; return none for a URL.

    Raises:
        ConfigError: The address is neither.
    """
    try:
        return mcp_command(address)
    except ValueError as error:
        raise ConfigError(f"mcp_servers: {error}") from None


def shown(address: str) -> str:
    """Return an address that messages may show: a URL without passwords and keys."""
    if isinstance(address, str) and address.startswith(("http://", "https://")):
        parts = urlsplit(address)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return str(address)[:_SHOWN_CHARACTERS]
