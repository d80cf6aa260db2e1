"""Addresses: checks URLs, MCP servers, names and URLs of servers, and knows which of a run's queues to ask.

A ValueError names the remedy. Of several queues on one database one is active, and the others stand by.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")


def checked_url(url: str) -> str:
    """Return an http(s) URL without trailing slashes. Raises ValueError if it is none."""
    if not _is_url(url):
        raise ValueError(f"{url!r} is not a URL; write it as http://host:port")
    return url.rstrip("/")


def mcp_command(address: str) -> list[str]:
    """Split the command line of an MCP server; empty for a URL. Raises ValueError if it is neither."""
    if not isinstance(address, str) or not address.strip():
        raise ValueError(
            f"{address!r} is not an MCP server; give a URL such as http://host:port/mcp, or a command line"
        )
    if address.startswith(("http://", "https://")):
        if not _is_url(address):
            raise ValueError(f"{address!r} is not a URL; write it as http://host:port/mcp")
        return []
    try:
        words = shlex.split(address)
    except ValueError as error:
        raise ValueError(f"{address!r} is not a command line: {error}; close the quotes") from None
    if "://" in words[0]:
        raise ValueError(f"{address!r}: only http:// and https:// are supported; give such a URL")
    if not words[0]:
        raise ValueError(f"{address!r} is not a command line: it names no program; write that first")
    return words


class McpServerAddress(BaseModel):
    """An MCP server, and which of its tools a task gets.

    Attributes:
        address: URL or command line.
        prefix: Stands before the names of its tools.
        include: Names of the tools that are used, as the server has them; all if there are none.
        exclude: Names of tools that are left out.
        transport: How a URL is spoken to: http (streamable HTTP), or the older sse.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str
    prefix: str = Field("", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    transport: Literal["http", "sse"] = "http"

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if mcp_command(self.address) and self.transport == "sse":
            raise ValueError(f"{self.address!r} is a command line, which is spoken to over stdio; leave out transport")
        return self


def mcp_server(given: Any) -> McpServerAddress:
    """Return the server that is given as a URL, a command line, or a mapping of these fields. Raises ValueError."""
    if isinstance(given, McpServerAddress):
        return given
    if isinstance(given, Mapping):
        return McpServerAddress.model_validate(dict(given))
    mcp_command(given)
    return McpServerAddress(address=given)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:  # brackets that do not close, or a port that is no number
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not any(map(str.isspace, text))


MAX_NAME_CHARACTERS = 64

_PORTS = {"http": 80, "https": 443}

_WORD = re.compile(r"[^\s/]+")


def check_name(name: str) -> None:
    """Check a server's name, which stands in routes, logs and labels of metrics. Raises ValueError."""
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable() or not _WORD.fullmatch(name):
        raise ValueError(
            f"server name {name[: MAX_NAME_CHARACTERS + 1]!r}: take a printable word of at most {MAX_NAME_CHARACTERS} "
            f"characters, without spaces and slashes"
        )


def normal_url(url: str) -> str:
    """Return one spelling for all of a server's URL: lower case, no default port, no trailing slash.

    Raises ValueError for anything but an http(s) URL of host, port and path.
    """
    wanted = f"server URL {url[:200]!r}: write it as http://host:port"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # a port that is not a number, a bracket that is not closed
        raise ValueError(f"{wanted} ({error})") from None
    plain = url.isprintable() and not re.search(r"[\s?#@\\\\]", url)
    if parts.scheme not in _PORTS or not host or port == 0 or not plain:
        raise ValueError(wanted)
    named = f"[{host}]" if ":" in host else host.rstrip(".")
    shown = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{named}{shown}{parts.path.rstrip('/')}"


# With several queues, the active one is asked so often whether it still is, and has so long to answer, seconds.
CHECK_EVERY_S = 1.0


class Moved(Exception):
    """Another queue is the active one while a call waits for an answer."""


def split_urls(given: str) -> list[str]:
    """Return the URLs in a list that is separated by commas. Raises `ValueError`, which names the one that is none."""
    found = [url.strip().rstrip("/") for url in given.split(",")]
    for url in found:
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise ValueError(f"{url!r} is not the URL of a queue; write it as http://host:port")
    return found


class QueueUrls:
    """Knows which of a run's queues to ask.

    Args:
        given: Their URLs, separated by commas. Raises `ValueError` if one is none.
    """

    def __init__(self, given: str) -> None:
        self._urls = split_urls(given)
        self._at = 0
        self._under_way: dict[asyncio.Future[None], str] = {}  # the URL of each call; set if it is not the active one's

    @property
    def current(self) -> str:
        """URL of the queue to ask: the active one, as far as is known."""
        return self._urls[self._at]

    @property
    def count(self) -> int:
        return len(self._urls)

    @property
    def are_several(self) -> bool:
        return self.count > 1

    def __str__(self) -> str:
        return ", ".join(self._urls)

    def failed(self, url: str) -> None:
        """Note that a queue did not answer, or is not active: the next one is asked. Other calls to it continue."""
        if url == self.current:
            self._at = (self._at + 1) % len(self._urls)

    async def watch(self, is_active: Callable[[str], Awaitable[bool]]) -> None:
        """Ask the current queue whether it is the active one, and find the one that is if not. Runs until cancelled.

        A queue that was stopped still accepts connections, so calls alone would wait for it until their time-outs.
        """
        loop = asyncio.get_running_loop()
        asked, at = [self.current], loop.time()
        while True:
            at = max(at + CHECK_EVERY_S, loop.time())
            await asyncio.sleep(at - loop.time())
            found = await _first_active(asked, is_active)
            if found is not None:
                self._is_active(found)
            # None of them may be active for a while. All at once: one that was stopped takes its whole time.
            asked = [self.current] if found is not None else self._urls

    async def unless_moved(self, url: str, call: Coroutine[Any, Any, T]) -> T:
        """Make a call to the queue at a URL. Raises `Moved` as soon as another one is known to be the active one."""
        if not self.are_several:
            return await call
        asked, moved = asyncio.ensure_future(call), asyncio.get_running_loop().create_future()
        self._under_way[moved] = url
        try:
            await asyncio.wait((asked, moved), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Moved
            return asked.result()
        finally:
            del self._under_way[moved]
            asked.cancel()

    def _is_active(self, url: str) -> None:
        """Ask this queue from now on, and break off the calls that wait for another one."""
        self._at = self._urls.index(url)
        for moved, asked in self._under_way.items():
            if asked != url and not moved.done():
                moved.set_result(None)


async def _first_active(urls: Sequence[str], is_active: Callable[[str], Awaitable[bool]]) -> str | None:
    """Return the URL that is the first to answer as the active queue; None if none does."""
    asking = {asyncio.ensure_future(is_active(url)): url for url in urls}
    left = set(asking)
    try:
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for answered in done:
                if answered.result():
                    return asking[answered]
        return None
    finally:
        for unanswered in left:
            unanswered.cancel()
