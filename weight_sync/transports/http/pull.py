"""A server's pull of one blob: several chunks at once into one buffer, each verified, from whoever has them.

What broke off goes on at the byte where it did. A source that fails steps back behind the others; one whose bytes are
wrong is not asked again, unless it is the last (the learner). Needs no vLLM.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from weight_sync.transports.base import TransferError
from weight_sync.transports.http import ranges
from weight_sync.transports.http.chunks import ChunkList, digest_of

logger = logging.getLogger(__name__)

# Connections of one pull.
LANES = 4
# A source that says nothing for so long is asked again, or another one.
STALL_TIMEOUT_S = 15.0
# A server behind NAT is never reached by the others: they find out soon, and ask the learner.
CONNECT_TIMEOUT_S = 3.0
RETRY_PAUSE_S = 0.2
RETRY_PAUSE_MOST_S = 5.0
# A chunk that arrives damaged from the last source so often is damaged there.
DAMAGED_MOST = 3


class _GoneError(Exception):
    """The source answers, and does not serve the blob (any more)."""


@dataclass
class Source:
    """Whom to ask: `url`, and how it has done so far."""

    url: str
    failures: int = 0
    distrusted: bool = False


@dataclass
class PullReport:
    """bytes_pulled: over the network, repeated ones included. by_source: of them, by URL. resumed: chunks that went on
    where they had broken off. kept: chunks that the buffer held already."""

    bytes_pulled: int = 0
    by_source: dict[str, int] = field(default_factory=dict)
    resumed: int = 0
    kept: int = 0
    seconds: float = 0.0


class Pull:
    """Fills `into` (writable, of `chunks.total_bytes`) with what `chunks` describes.

    sources: URLs of the bytes, in the order in which they are to be asked; the last is the learner's. held: chunks that
    `into` already has right, by index.
    """

    def __init__(
        self,
        chunks: ChunkList,
        secret: str,
        sources: list[str],
        into: memoryview,
        timeout_s: float,
        held: set[int] | None = None,
        lanes: int = LANES,
    ) -> None:
        if len(into) != chunks.total_bytes:
            raise ValueError(f"a buffer of {len(into)} bytes for {chunks.total_bytes}")
        if not sources:
            raise ValueError("no source to pull from")
        self.report = PullReport(kept=len(held or ()))
        # A lane may still write into the buffer: it must not be used again.
        self.abandoned = False
        self._chunks = chunks
        # A server that holds another version by now answers 412.
        self._headers = {"Authorization": f"Bearer {secret}", "If-Match": f'"{chunks.root}"'}
        self._sources = [Source(url) for url in sources]
        self._into = into
        self._timeout_s = timeout_s
        self._lanes = lanes
        self._lock = threading.Lock()
        missing = [index for index in range(len(chunks.digests)) if index not in (held or ())]
        self._left = deque(missing)
        self._arrived = dict.fromkeys(missing, 0)
        self._damaged = dict.fromkeys(missing, 0)
        self._error: str | None = None

    def run(self) -> PullReport:
        """Blocks until every chunk is there and right. Raises `TransferError`, which names who did not deliver."""
        began = time.monotonic()
        deadline = began + self._timeout_s
        lanes = [
            threading.Thread(target=self._lane, args=(deadline,), name="weight-pull", daemon=True)
            for _ in range(min(self._lanes, len(self._left)))
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join(max(0.0, deadline - time.monotonic()))
        if self._left or any(lane.is_alive() for lane in lanes):
            self.stop(f"not all there after {self._timeout_s:g} s")
        for lane in lanes:  # a lane that was told to stop looks up when its socket does
            lane.join(STALL_TIMEOUT_S + 1)
        self.report.seconds = time.monotonic() - began
        self.abandoned = any(lane.is_alive() for lane in lanes)
        if self._error is not None:
            raise TransferError(f"the pull from {self._sources[-1].url} failed: {self._error}")
        return self.report

    def stop(self, reason: str) -> None:
        """End the pull from another thread; `run` raises."""
        with self._lock:
            self._error = self._error or reason

    def _lane(self, deadline: float) -> None:
        connection = _Connection(self._headers)
        try:
            while (index := self._next(deadline)) is not None:
                source = self._source()
                try:
                    self._fetch(connection, source, index, deadline)
                except (OSError, http.client.HTTPException, _GoneError) as error:
                    connection.close()
                    self._put_back(index, source, error, deadline)
        except Exception as error:  # whatever it is, `run` raises it
            self.stop(f"{type(error).__name__}: {error}")
        finally:
            connection.close()

    def _next(self, deadline: float) -> int | None:
        with self._lock:
            if self._error is not None or not self._left:
                return None
            if time.monotonic() >= deadline:
                self._error = f"not all there after {self._timeout_s:g} s"
                return None
            return self._left.popleft()

    def _source(self) -> Source:
        """The first of those that have failed least, and whose bytes were right."""
        with self._lock:
            trusted = [source for source in self._sources if not source.distrusted]
            return min(trusted or self._sources[-1:], key=lambda source: source.failures)

    def _fetch(self, connection: _Connection, source: Source, index: int, deadline: float) -> None:
        start, end = self._chunks.place(index)
        if self._arrived[index]:
            with self._lock:
                self.report.resumed += 1
        if start + self._arrived[index] < end:
            timeout_s = min(STALL_TIMEOUT_S, max(0.1, deadline - time.monotonic()))
            connection.read_range(
                source.url,
                start + self._arrived[index],
                self._into[start + self._arrived[index] : end],
                timeout_s,
                lambda count: self._count(index, source, count),
            )
        if digest_of(self._into[start:end]) != self._chunks.digests[index]:
            self._distrust(index, source)

    def _count(self, index: int, source: Source, count: int) -> bool:
        """Note what arrived; whether to go on."""
        with self._lock:
            self._arrived[index] += count
            self.report.bytes_pulled += count
            self.report.by_source[source.url] = self.report.by_source.get(source.url, 0) + count
            return self._error is None

    def _distrust(self, index: int, source: Source) -> None:
        logger.warning("chunk %d from %s has another digest than the learner's", index, source.url)
        with self._lock:
            self._arrived[index] = 0
            self._damaged[index] += 1
            source.distrusted = True
            self._left.append(index)
            if source is self._sources[-1] and self._damaged[index] >= DAMAGED_MOST:
                self._error = f"chunk {index} arrived {DAMAGED_MOST} times with another digest than the learner's"

    def _put_back(self, index: int, source: Source, error: Exception, deadline: float) -> None:
        with self._lock:
            self._left.appendleft(index)
            source.failures += 1
            failures = min(other.failures for other in self._sources if not other.distrusted or other is source)
            if isinstance(error, _GoneError) and source is self._sources[-1]:
                self._error = str(error)
        logger.info("chunk %d from %s broke off: %s: %s", index, source.url, type(error).__name__, error)
        if failures:  # every source has failed once: no hurry
            pause = min(RETRY_PAUSE_S * 2 ** (failures - 1), RETRY_PAUSE_MOST_S, max(0.0, deadline - time.monotonic()))
            time.sleep(pause)


class _Connection:
    """One connection, kept while the same host is asked."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers
        self._netloc = ""
        self._http: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def read_range(
        self, url: str, start: int, into: memoryview, timeout_s: float, arrived: Callable[[int], bool]
    ) -> None:
        """Bytes `start` to `start + len(into)` of `url`, read straight into `into`. `arrived` is told of each piece,
        and says whether to go on; where not, the rest is left. Raises OSError, HTTPException or `_GoneError`."""
        parts = urlsplit(url)
        if self._http is None or self._netloc != parts.netloc:
            self.close()
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._http, self._netloc = kind(parts.netloc, timeout=min(timeout_s, CONNECT_TIMEOUT_S)), parts.netloc
            self._http.connect()
        self._http.sock.settimeout(timeout_s)
        header = {**self._headers, "Range": f"bytes={start}-{start + len(into) - 1}"}
        self._http.request("GET", parts.path, headers=header)
        response = self._http.getresponse()
        if response.status != 206:
            text = response.read(300).decode(errors="replace")
            raise _GoneError(f"{parts.scheme}://{parts.netloc} answered HTTP {response.status}: {text}")
        if int(response.headers.get("Content-Length", -1)) != len(into):
            raise OSError(f"{url}: an answer of {response.headers.get('Content-Length')} bytes to {len(into)} asked")
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
