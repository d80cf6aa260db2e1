"""Pulls one blob to a server: several chunks at once into one buffer, each verified.

A chunk that broke off continues at the byte where it did, also in a later pull into the same buffer. A source that
fails or is slow moves behind the others; one whose bytes are wrong is not asked again, unless it is the last (the
learner).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.http.chunks import ChunkList, digest_of
from slipstream.weight_sync.transports.http.pull_sources import (
    CONNECT_TIMEOUT_S,
    FAILURES,
    MAX_REFUSED_S,
    Attempt,
    GoneError,
    PullSource,
    Sources,
    Wire,
)

logger = logging.getLogger(__name__)

# By how much longer than measured the time-out should be that an error names.
SLACK = 1.25
# Connections of one pull.
LANES = 4
# Seconds between checks of the connections' speed.
LOOK_EVERY_S = 0.25
# Seconds within which a lane ends after its connection was ended; only one that is connecting takes so long.
END_S = CONNECT_TIMEOUT_S + 2
# Number of damaged arrivals from the last source after which the chunk must be damaged there.
MAX_DAMAGED = 3
# The source of bytes that were there before the pull.
_EARLIER = PullSource("an earlier pull")


@dataclass
class PullReport:
    """Counts of one pull.

    Attributes:
        bytes_pulled: Bytes over the network, repeated ones included.
        by_source: Of these, by URL.
        resumed: How often a chunk continued where it had broken off.
    """

    bytes_pulled: int = 0
    by_source: dict[str, int] = field(default_factory=dict)
    resumed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class World:
    """The clock and the network of a pull, which tests replace.

    Attributes:
        clock: Returns seconds on a steady clock.
        wire: Makes a connection, given the headers of every request.
    """

    clock: Callable[[], float] = time.monotonic
    wire: Callable[[dict[str, str]], Wire] = Wire


class Pull:
    """One pull into one buffer.

    Attributes:
        report: Counts so far.
        abandoned: Whether a lane may still write into the buffer, which must not be used again then.
    """

    def __init__(
        self,
        chunks: ChunkList,
        secret: str,
        sources: list[str],
        into: memoryview,
        timeout_s: float,
        begun: Mapping[int, int] | None = None,
        lanes: int = LANES,
        world: World | None = None,
    ) -> None:
        """Prepare a pull.

        Args:
            secret: To be brought to every source.
            sources: URLs of the bytes, in the order to ask; the last is the learner's.
            into: Writable buffer of `chunks.total_bytes`.
            timeout_s: Bound on the whole pull, in seconds.
            begun: Bytes at the front of chunks that `into` may hold, by index: of a pull that broke off, or of an
                earlier blob. A chunk that turns out to be another is pulled whole.
            lanes: Number of connections at once.
            world: The clock and the network; None: the real ones.
        """
        if len(into) != chunks.total_bytes:
            raise ValueError(f"the buffer has {len(into)} bytes, and the chunks have {chunks.total_bytes}")
        if not sources:
            raise ValueError("no source to pull from")
        self.report = PullReport()
        self.abandoned = False
        self._chunks = chunks
        # A server that holds another version by now answers 412.
        self._headers = {"Authorization": f"Bearer {secret}", "If-Match": f'"{chunks.root}"'}
        self._sources = Sources(sources)
        self._into = into
        self._timeout_s = timeout_s
        self._world = world or World()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._parts = [_Part(*chunks.place(index)) for index in range(len(chunks.digests))]
        for index, count in (begun or {}).items():
            self._parts[index].go_on(count)
        self._left = deque(range(len(self._parts)))
        self._total = sum(part.missing for part in self._parts)
        self._lanes = [_Lane(self._world.wire(self._headers)) for _ in range(min(lanes, len(self._parts)))]
        self._deadline = 0.0
        self._error: str | None = None

    def run(self) -> PullReport:
        """Block until every chunk has arrived and is right.

        Raises:
            TransferError: Not all arrived. The text names the sources that failed.
        """
        began = self._world.clock()
        self._deadline = began + self._timeout_s
        threads = [
            threading.Thread(target=self._work, args=(lane,), name="weight-pull", daemon=True) for lane in self._lanes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not self._ended.is_set():
                thread.join(LOOK_EVERY_S)
                self._look()
        until = time.monotonic() + END_S
        while (alive := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < until:
            for lane in self._lanes:  # A second time, as a lane that was connecting had nothing to end.
                lane.wire.end()
            alive[0].join(LOOK_EVERY_S)
        self.report.seconds = self._world.clock() - began
        self.abandoned = any(thread.is_alive() for thread in threads)
        if self._error is not None:
            raise TransferError(f"the pull from {self._sources.last.url} failed: {self._error}")
        return self.report

    @property
    def begun(self) -> dict[int, int]:
        """The bytes at the front of chunks that are not whole, by index: what another pull can begin with."""
        return {index: part.arrived for index, part in enumerate(self._parts) if part.arrived and part.missing}

    def stop(self, reason: str) -> None:
        """End the pull from another thread. `run` raises then."""
        with self._lock:
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        self._error = self._error or reason
        self._ended.set()
        for lane in self._lanes:
            lane.wire.end()

    def _look(self) -> None:
        """End the pull when its time is over, and requests that are too slow."""
        with self._lock:
            now = self._world.clock()
            if now >= self._deadline:
                if not all(part.right for part in self._parts):
                    self._stop(self._late())
                return
            left = sum(part.missing for part in self._parts)
            # Twice the speed that the pull needs to end in time.
            least = 2 * left / (self._deadline - now) / max(1, len(self._lanes))
            for lane in self._lanes:
                if lane.attempt is not None and self._sources.too_slow(lane.attempt, now, least):
                    lane.wire.end()

    def _late(self) -> str:
        missing = sum(not part.right for part in self._parts)
        chunks = f"{missing} of {len(self._chunks.digests)} chunks"
        text = f"not all there after {self._timeout_s:.3g} s: {chunks} are missing; {self._describe_rate()}"
        return f"{text} ({describe_failures})" if (describe_failures := self._sources.describe_failures()) else text

    def _describe_rate(self) -> str:
        """Say how many bytes came from where, how fast, and what the whole would have needed."""
        came, total = self.report.bytes_pulled, self._total
        by_source = sorted(self.report.by_source.items(), key=lambda item: -item[1])
        sources = ", ".join(f"{count / 1e6:.1f} MB from {url}" for url, count in by_source) or "none"
        need = f"in time it needs {total / 1e6 / self._timeout_s:.3g} MB/s"
        if came:
            need += f", or weight_sync.timeout_s = {total * self._timeout_s / came * SLACK:.0f} at this rate"
        rate = f"{came / 1e6 / self._timeout_s:.3g} MB/s ({sources})"
        return f"{came / 1e6:.1f} of {total / 1e6:.1f} MB came, at {rate}; {need}"

    def _work(self, lane: _Lane) -> None:
        try:
            while (index := self._next()) is not None:
                pause_s = self._fetch(lane, index)
                if pause_s:
                    self._ended.wait(pause_s)
        except Exception as error:  # `run` raises it.
            self.stop(f"{type(error).__name__}: {error}")
        finally:
            lane.wire.close()

    def _next(self) -> int | None:
        with self._lock:
            return self._left.popleft() if self._left and self._error is None else None

    def _fetch(self, lane: _Lane, index: int) -> float:
        """Request the rest of a chunk. Returns the seconds to wait before the next request."""
        attempt, part = self._begin(lane, index), self._parts[index]
        at, asked = part.start + part.arrived, part.missing > 0
        try:
            if asked:
                lane.wire.read_range(
                    attempt.source.url, at, self._into[at : part.end], lambda count: self._count(attempt, part, count)
                )
        except (*FAILURES, GoneError) as error:
            return self._put_back(lane, index, attempt, error)
        with self._lock:
            lane.attempt = None
            if self._error is not None:
                return 0.0
            if asked:
                self._sources.done(attempt, self._world.clock())
        right = digest_of(self._into[part.start : part.end]) == self._chunks.digests[index]
        with self._lock:
            part.right = right
            if not right:
                self._damaged(index, part)
        return 0.0

    def _begin(self, lane: _Lane, index: int) -> Attempt:
        with self._lock:
            attempt, part = self._sources.begin(self._world.clock()), self._parts[index]
            if part.unmixed and part.sources - {attempt.source}:
                part.restart()
            self.report.resumed += part.arrived > 0 and part.missing > 0
            lane.attempt = attempt
            return attempt

    def _count(self, attempt: Attempt, part: _Part, count: int) -> bool:
        """Note `count` bytes that arrived. Returns whether to continue."""
        url = attempt.source.url
        with self._lock:
            part.arrived += count
            part.sources.add(attempt.source)
            self.report.bytes_pulled += count
            self.report.by_source[url] = self.report.by_source.get(url, 0) + count
            self._sources.note(attempt, count, self._world.clock())
            return self._error is None

    def _damaged(self, index: int, part: _Part) -> None:
        """Have a damaged chunk pulled again, from one source only: which of several sent wrong bytes is not known."""
        if part.sources == {_EARLIER}:  # it is another blob's
            self._total += part.end - part.start
            part.restart()
            self._left.append(index)
            return
        urls = ", ".join(source.url for source in part.sources)
        logger.warning("chunk %d from %s has another digest than the learner's", index, urls)
        if len(part.sources) == 1:
            (source,) = part.sources
            self._sources.distrust(source)
            part.damaged += source is self._sources.last
            if part.damaged >= MAX_DAMAGED:
                self._stop(f"chunk {index} arrived {MAX_DAMAGED} times with another digest than the learner's")
        part.unmixed = True
        part.restart()
        self._left.append(index)

    def _put_back(self, lane: _Lane, index: int, attempt: Attempt, error: Exception) -> float:
        lane.wire.close()
        with self._lock:
            lane.attempt = None
            if self._error is not None:
                return 0.0
            self._left.appendleft(index)
            now = self._world.clock()
            pause_s = self._sources.failed(attempt, error, now)
            logger.info("chunk %d from %s broke off: %s", index, attempt.source.url, attempt.source.last_error)
            if attempt.source is not self._sources.last:
                return pause_s
            if isinstance(error, GoneError):
                self._stop(str(error))
            elif (gone_s := self._sources.gone_s(now)) >= MAX_REFUSED_S:
                self._stop(
                    f"the connection was refused for {gone_s:.0f} s: the learner is gone, or weight_sync.host and "
                    f"weight_sync.http_port do not lead to it; this server keeps the weights that it serves"
                )
            return pause_s


@dataclass
class _Part:
    """A chunk that is being pulled: bytes `start` to `end`.

    Attributes:
        arrived: Bytes that have arrived.
        sources: The sources that sent them.
        unmixed: Whether all its bytes must come from one source.
        damaged: How often the last source sent it wrong.
        right: Whether its digest agrees.
    """

    start: int
    end: int
    arrived: int = 0
    sources: set[PullSource] = field(default_factory=set)
    unmixed: bool = False
    damaged: int = 0
    right: bool = False

    def go_on(self, arrived: int) -> None:
        """Begin behind bytes that an earlier pull brought; which source sent them is not known any more."""
        self.arrived = min(arrived, self.end - self.start)
        if self.arrived:
            self.sources = {_EARLIER}

    @property
    def missing(self) -> int:
        """Bytes that have not arrived."""
        return self.end - self.start - self.arrived

    def restart(self) -> None:
        self.arrived = 0
        self.sources = set()


@dataclass
class _Lane:
    """One connection of a pull, and its running request."""

    wire: Wire
    attempt: Attempt | None = None
