"""Checks addresses: URLs, MCP servers, names and URLs of vLLM servers. A ValueError names the remedy."""

from __future__ import annotations

import re
import shlex
from urllib.parse import urlsplit


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
