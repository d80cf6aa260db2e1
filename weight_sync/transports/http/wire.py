"""One connection of a pull, over which ranges of bytes are asked for."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from weight_sync.transports.http import ranges

# A server behind NAT is never reached by the others: they find out soon, and ask the learner.
CONNECT_TIMEOUT_S = 3.0
# One read. Who pulls looks after its connections, and ends a slow one sooner.
READ_TIMEOUT_S = 300.0
_PORTS = {"http": 80, "https": 443}
# What a source can do wrong, in the answer's first line, its headers or its body.
FAILURES = (OSError, http.client.HTTPException, ValueError)


class GoneError(Exception):
    """The source answers, and does not serve the blob (any more)."""


class Wire:
    """One connection, kept while the same host is asked. `end` may be called from any thread, the rest from one."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers
        self._place = ("", "")
        self._http: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None

    def close(self) -> None:
        self._socket = None
        if self._http is not None:
            self._http.close()
            self._http = None

    def end(self) -> None:
        """What is being read fails at once."""
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def read_range(self, url: str, start: int, into: memoryview, arrived: Callable[[int], bool]) -> None:
        """Bytes `start` to `start + len(into)` of `url`, read straight into `into`. `arrived` is told of each piece,
        and says whether to go on; where not, the rest is left. Raises `GoneError`, or one of `FAILURES`."""
        parts = urlsplit(url)
        connection = self._connected(parts.scheme, parts.netloc, parts.hostname or "", parts.port)
        header = {**self._headers, "Range": f"bytes={start}-{start + len(into) - 1}"}
        connection.request("GET", parts.path, headers=header)
        response = connection.getresponse()
        if response.status != 206:
            text = f"{parts.scheme}://{parts.netloc} answered HTTP {response.status}: "
            text += response.read(300).decode(errors="replace")
            # 5xx is what a proxy says of a moment.
            raise OSError(text) if response.status >= 500 else GoneError(text)
        if (length := response.headers.get("Content-Length", "")) != str(len(into)):
            raise OSError(f"{url}: an answer of {length[:40]!r} bytes to {len(into)} asked")
        done = 0
        while done < len(into):
            # Not `readinto`: it waits for all, and what is there when the connection breaks off would not be counted.
            piece = response.read1(min(ranges.SLICE_BYTES, len(into) - done))
            if not piece:
                raise OSError(f"the connection ended after {done} of {len(into)} bytes")
            into[done : done + len(piece)] = piece
            done += len(piece)
            if not arrived(len(piece)):
                self.close()
                return
        response.read()

    def _connected(self, scheme: str, netloc: str, host: str, port: int | None) -> http.client.HTTPConnection:
        # An answer with `Connection: close` leaves it without its socket.
        if self._http is not None and self._place == (scheme, netloc) and self._http.sock is not None:
            return self._http
        self.close()
        opened: socket.socket = socket.create_connection((host, port or _PORTS.get(scheme, 80)), CONNECT_TIMEOUT_S)
        # Before the handshake, so that `end` reaches it there too.
        if scheme == "https":
            opened = ssl.create_default_context().wrap_socket(
                opened, server_hostname=host, do_handshake_on_connect=False
            )
        self._socket = opened
        self._http, self._place = http.client.HTTPConnection(netloc), (scheme, netloc)
        self._http.sock = opened
        if isinstance(opened, ssl.SSLSocket):
            opened.do_handshake()
        opened.settimeout(READ_TIMEOUT_S)
        return self._http
