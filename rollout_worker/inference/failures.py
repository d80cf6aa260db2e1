"""Failures of sampling, one class for each way to react to them; the breaker of a server that fails; and notices of
first failures for people to read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from slipstream.protocol.messages import Notice, Server
from slipstream.protocol.versions import describe_label
from slipstream.rollout_worker.user_code.values import encodable

# Statuses of a server that is too busy or too slow: the request is not at fault.
_BUSY = frozenset({408, 425, 429})

# Statuses of a wrong token, a wrong model or a route that is switched off: this server answers every request so.
_UNFIT = frozenset({401, 403, 404, 405, 407})

FAILURES = 3

PAUSE_S, MAX_PAUSE_S = 1.0, 60.0

logger = logging.getLogger(__name__)

MAX_NOTICES = 16

MAX_CHARACTERS = 500

# Seconds without a failure of its kind after which the next one is told again.
AGAIN_AFTER_S = 300.0


class Doubtful(Exception):
    """Either the request or the server is at fault; one try on another server tells which.

    Attributes:
        server: The server that answered; the pool sets it.
    """

    server: Server | None = None

    @property
    def description(self) -> str:
        """The text with the server's name."""
        return str(self) if self.server is None else f"server {self.server.name} at {self.server.url}: {self}"


class RequestRejected(Doubtful):
    """A 4xx that is the request's own fault, unless another server takes it. `blamed`: whether it was counted as the
    server's fault."""

    blamed = False


class ServerFailed(Exception):
    """A server failed: a 5xx, a busy server, a lost connection or no answer in time. Try again, or on another
    server."""


class ServerUnfit(ServerFailed):
    """This server would answer every request so. It gets no requests for a while."""


class ServerLeft(ServerFailed):
    """The server left service while the request ran. Neither the request nor the server failed."""


class BadSample(Doubtful):
    """An answer that cannot be trained on, such as one without log-probs. It is the server's failure and never
    repaired."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class UnknownWeights(Exception):
    """Tokens of weights whose label is no version of this run: the server was restarted, was never updated, or serves
    another run."""

    def __init__(self, label: str, server: str, run_id: str = "") -> None:
        super().__init__(f"{server}: {describe_label(label, run_id)}")
        self.label = label
        self.server = server


class EpisodeFailed(Exception):
    """An episode cannot continue.

    Attributes:
        reason: A code of `slipstream.protocol.reasons`.
        retryable: Whether another attempt may succeed.
        kind: Kind of the notice, as in `FailureNotices.add`.
        key: Key of the notice; by default the reason.
        where: file:line of the user's code.
    """

    def __init__(
        self,
        reason: str,
        detail: str,
        retryable: bool,
        kind: str = "episode",
        key: str | None = None,
        where: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retryable = retryable
        self.kind = kind
        self.key = key or reason
        self.where = where


def error_of(status: int, message: str) -> RequestRejected | ServerFailed:
    """Return the error for an HTTP status other than 200."""
    text = f"HTTP {status}: {message[:500]}"
    if status in _UNFIT:
        return ServerUnfit(f"{text}; is this a server that `slipstream vllm` started with this run file?")
    return RequestRejected(text) if 400 <= status < 500 and status not in _BUSY else ServerFailed(text)


class _State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    TRIAL_DUE = "trial due"
    ON_TRIAL = "on trial"


class Breaker:
    """Keeps requests from one server after failures in a row, then tries it with a single request. Pure.

    It opens after `FAILURES` in a row, or at once where every request would fail alike. Its pause doubles with each
    trial that fails, from `PAUSE_S` to `MAX_PAUSE_S` seconds.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._state = _State.CLOSED
        self._pause_s = PAUSE_S

    @property
    def admits(self) -> bool:
        """Whether a request may go to the server now."""
        return self._state in (_State.CLOSED, _State.TRIAL_DUE)

    def began(self) -> bool:
        """Note that a request goes to the server. Returns whether it is the trial."""
        if self._state is _State.TRIAL_DUE:
            self._state = _State.ON_TRIAL
            return True
        return False

    def failed(self, for_all: bool = False, trial: bool = False) -> float | None:
        """Note that a request failed. Returns the seconds of the pause if one begins. `for_all`: every request would
        fail so."""
        self.failures += 1
        if trial:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        elif self._state is not _State.CLOSED or (self.failures < FAILURES and not for_all):
            return None
        self._state = _State.OPEN
        return self._pause_s

    def succeeded(self) -> None:
        """Note that the server answered as it should."""
        self.failures, self._state, self._pause_s = 0, _State.CLOSED, PAUSE_S

    def undecided(self, trial: bool) -> None:
        """Note that a request was given up before it ended; if it was the trial, another one is due."""
        if trial:
            self._state = _State.TRIAL_DUE

    def pause_over(self) -> None:
        if self._state is _State.OPEN:
            self._state = _State.TRIAL_DUE


@dataclass
class _Kept:
    """Failures that are alike.

    Attributes:
        place: Of their notice, among all.
        last_at: When the newest came.
        count: How many have come.
    """

    place: int
    last_at: float
    count: int = 1


class FailureNotices:
    """Keeps the first failure of each kind and key for people to read, and tells it again when it comes back after a
    while. The counters count all failures.

    Attributes:
        found: At most `MAX_NOTICES` notices.
        on_new: Called after each new one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.found: list[Notice] = []
        self.on_new: Callable[[], None] = lambda: None
        self._clock = clock
        self._kept: dict[tuple[str, str], _Kept] = {}

    def add(self, kind: str, key: str, text: str, where: str | None = None) -> None:
        """Keep a failure, if none of its kind and key has come for `AGAIN_AFTER_S`.

        Args:
            kind: As in `Notice`.
            key: Identifies the failure; the same for failures that are alike.
            where: file:line of the user's code.
        """
        now, kept, again = self._clock(), self._kept.get((kind, key)), ""
        if kept is None:
            if len(self.found) == MAX_NOTICES:
                return
            kept = self._kept[kind, key] = _Kept(len(self.found), now)
        else:
            since_s, kept.last_at = now - kept.last_at, now
            kept.count += 1
            if since_s < AGAIN_AFTER_S:
                return
            again = f"; again, after {since_s / 60:.0f} min without, and {kept.count - 1:,} like it before"
        place = f" ({where[-MAX_CHARACTERS // 2 :]})" if where else ""
        room = MAX_CHARACTERS - len(place) - len(again)
        whole = " ".join(text.split())
        shown = (whole if len(whole) <= room else f"{whole[: room - 3]}...") + place + again
        notice = Notice(kind, encodable(shown))
        self.found[kept.place : kept.place + 1] = [notice]
        logger.warning("%s; others like it are only counted", notice.text)
        self.on_new()
