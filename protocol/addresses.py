"""What a URL and an MCP server's address look like. Each raises `ValueError` with the remedy."""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit


def checked_url(url: str) -> str:
    """An http(s) URL, without slashes at its end."""
    if not _is_url(url):
        raise ValueError(f"{url!r} is not a URL; write it as http://host:port")
    return url.rstrip("/")


def mcp_command(address: str) -> list[str]:
    """The words of an MCP server's command line; none of a URL."""
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
        raise ValueError(f"{address!r}: only http:// and https:// are spoken; give such a URL")
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
