"""Decides which source a pull asks, how fast a source must be and how long a pull waits. `Wire` is one connection.

The source with the fewest failures is asked, the learner last. One that sends too little for a while is passed over; if
all send too little, the network is slow and less is asked of each. The decisions do no I/O, take times as arguments and
are not thread-safe.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from slipstream.weight_sync.transports.http import chunks

# Seconds without a byte after which the request is made again, to this source or another.
SILENCE_S = 2.0

# If there are other sources, a request must bring this many bytes in each period, far below any network for weights.
PACE_S = 5.0
PACE_BYTES_PER_S = 1e6

# Number of times that both periods may double, each time with a quarter of the speed.
MAX_SLACK = 5
RETRY_PAUSE_S = 0.2
MAX_RETRY_PAUSE_S = 5.0

# Bytes of an attempt after which the next one need not wait.
WORTH_BYTES = 64 * 1024

# The learner's port is closed: its process is gone, and its secret with it.
MAX_REFUSED_S = 20.0

# A server behind NAT cannot be reached by the others: they find that out soon and ask the learner.
CONNECT_TIMEOUT_S = 3.0

# Bound on one read. The pull watches its connections and ends a slow one sooner.
READ_TIMEOUT_S = 300.0
_PORTS = {"http": 80, "https": 443}

# Errors that a source can cause, in the answer's first line, its headers or its body.
FAILURES = (OSError, http.client.HTTPException, ValueError)


@dataclass(eq=False)
class PullSource:
    """A source at `url`, and how it has done so far.

    Attributes:
        faults: Attempts that failed, the last one at `fault_at`.
        barren: Failed attempts in a row that brought next to nothing.
        slow_at: The slack at which it was too slow, -1 if it never was.
        down: Whether its last attempt brought next to nothing, and not by being slow.
        distrusted: Whether its bytes were wrong.
        refused_since: Since when its port has been closed, None if it is open.
        last_error: Why its newest attempt failed; empty before the first failure.
    """

    url: str
    faults: int = 0
    fault_at: float = float("-inf")
    barren: int = 0
    slow_at: int = -1
    down: bool = False
    distrusted: bool = False
    refused_since: float | None = None
    last_error: str = ""


@dataclass(eq=False)
class Attempt:
    """One request to a source, from `began` on.

    Attributes:
        heard_at: When its last bytes came.
        slow: Reason to end it for being too slow; "" if there is none.
        slack: The slack with which it was too slow; -1 if more would not have helped.
    """

    source: PullSource
    began: float
    heard_at: float
    window_began: float
    in_window: int = 0
    arrived: int = 0
    slow: str = ""
    slack: int = -1


class Sources:
    """The sources of one pull, in the order to ask; the last is the learner's."""

    def __init__(self, urls: list[str]) -> None:
        self.all = [PullSource(url) for url in urls]
        self.last = self.all[-1]
        self._slack = 0
        self._worth_at = float("-inf")

    def begin(self, now: float) -> Attempt:
        """Begin an attempt at the first of the sources with the fewest failures whose bytes were right."""
        return Attempt(min(self._usable(), key=lambda source: source.faults), now, now, now)

    def note(self, attempt: Attempt, count: int, now: float) -> None:
        """Note `count` bytes that came."""
        attempt.heard_at = now
        attempt.in_window += count
        attempt.arrived += count
        attempt.source.refused_since = None
        if attempt.arrived >= WORTH_BYTES:
            self.done(attempt, now)

    def done(self, attempt: Attempt, now: float) -> None:
        """Note that the attempt brought all that it asked for, or enough."""
        attempt.source.barren = 0
        self._worth_at = now

    def too_slow(self, attempt: Attempt, now: float, least_bytes_per_s: float) -> bool:
        """Return whether to end the attempt: it is silent, or slower than `least_bytes_per_s` or than any network."""
        if attempt.slow:
            return True
        if (silent_s := now - attempt.heard_at) >= SILENCE_S * 2**self._slack:
            attempt.slow = f"it said nothing for {silent_s:.1f} s"
            # One that sent bytes and then fell silent is broken, not slow.
            attempt.slack = self._slack if attempt.arrived < WORTH_BYTES else -1
        elif (while_s := now - attempt.window_began) >= PACE_S * 2**self._slack:
            pace = attempt.in_window / while_s
            if pace < max(PACE_BYTES_PER_S, least_bytes_per_s) / 4**self._slack and len(self._usable()) > 1:
                attempt.slow, attempt.slack = f"it sent {pace:.0f} bytes a second", self._slack
            attempt.window_began, attempt.in_window = now, 0
        return bool(attempt.slow)

    def failed(self, attempt: Attempt, error: Exception, now: float) -> float:
        """Note that the attempt failed. Returns the seconds to wait before the next one."""
        source = attempt.source
        source.last_error = attempt.slow or f"{type(error).__name__}: {error}"
        if not isinstance(error, ConnectionRefusedError):
            source.refused_since = None
        elif source.refused_since is None:
            source.refused_since = now
        # A fault on several connections at once counts once.
        if attempt.began >= source.fault_at:
            source.fault_at = now
            source.faults += 1
            source.barren += attempt.arrived < WORTH_BYTES
        source.down = not attempt.slow and attempt.arrived < WORTH_BYTES
        source.slow_at = max(source.slow_at, attempt.slack)
        if source.slow_at == self._slack and all(
            other.slow_at == self._slack or other.down for other in self._usable()
        ):
            self._slack = min(self._slack + 1, MAX_SLACK)
        barren = min(other.barren for other in {*self._usable(), source})
        # No source has brought anything of late, so there is no hurry.
        return min(RETRY_PAUSE_S * 2 ** min(barren - 1, 10), MAX_RETRY_PAUSE_S) if barren else 0.0

    def gone_s(self, now: float) -> float:
        """Return for how many seconds the learner has refused connections and no source has brought anything."""
        since = self.last.refused_since
        return 0.0 if since is None else now - max(since, self._worth_at)

    def distrust(self, source: PullSource) -> None:
        """Note that the source's bytes were wrong. It is not asked again, unless it is the last."""
        source.distrusted = source is not self.last
        source.faults += 1
        source.last_error = "its bytes were wrong"

    def describe_failures(self) -> str:
        """Describe the last error of each source; "" if there is none."""
        return "; ".join(f"{source.url}: {source.last_error}" for source in self.all if source.last_error)

    def _usable(self) -> list[PullSource]:
        return [source for source in self.all if not source.distrusted]


class GoneError(Exception):
    """The source answers, but does not serve the blob, or not any more."""


class Wire:
    """One connection, kept while the same host is asked. Only `end` may be called from other threads."""

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
        """Make the running read fail at once."""
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def read_range(self, url: str, start: int, into: memoryview, arrived: Callable[[int], bool]) -> None:
        """Read bytes `start` to `start + len(into)` of `url` into `into`.

        Args:
            arrived: Called with the size of each piece. Returns whether to continue; if not, the rest is left.

        Raises:
            GoneError: The source does not serve the blob.
            FAILURES: Any of these, if the request fails.
        """
        parts = urlsplit(url)
        connection = self._connected(parts.scheme, parts.netloc, parts.hostname or "", parts.port)
        header = {**self._headers, "Range": f"bytes={start}-{start + len(into) - 1}"}
        connection.request("GET", parts.path, headers=header)
        response = connection.getresponse()
        if response.status != 206:
            text = f"{parts.scheme}://{parts.netloc} answered HTTP {response.status}: "
            text += response.read(300).decode(errors="replace")
            # A 5xx is a proxy's answer to a short outage.
            raise OSError(text) if response.status >= 500 else GoneError(text)
        if (length := response.headers.get("Content-Length", "")) != str(len(into)):
            raise OSError(f"{url}: an answer of {length[:40]!r} bytes to {len(into)} asked")
        done = 0
        while done < len(into):
            # Not `readinto`: it waits for all, and bytes that came before the connection broke off would not be
            # counted.
            piece = response.read1(min(chunks.SLICE_BYTES, len(into) - done))
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
