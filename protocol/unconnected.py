"""Why a connection failed, in words that name what to look at."""

from __future__ import annotations

import os
import socket

import aiohttp


def why(error: BaseException) -> str:
    """Of any error of aiohttp's client; never empty."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return of_host(error.host, error.os_error)
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or type(error).__name__


def of_host(host: str, error: BaseException) -> str:
    """Of a host name that could not be looked up. The numbers of such errors are not those of `os.strerror`."""
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return f"host name {host} cannot be looked up now: {error.strerror}"
    return f"host name {host} is not known"
