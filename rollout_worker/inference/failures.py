"""What can go wrong with a sample, one class for each way to react."""

from __future__ import annotations

from protocol.messages import Server
from protocol.versions import describe_label

# Too busy, or too slow to take the request in: it is not the request that is wrong.
_BUSY = frozenset({408, 425, 429})

# A wrong token, the wrong model, a route that is not switched on: whatever is asked for, this server says so.
_UNFIT = frozenset({401, 403, 404, 405, 407})


class Doubtful(Exception):
    """Wrong by the request or by the server: one try on another server tells which. `server`: whose answer it is, set
    by the pool."""

    server: Server | None = None

    @property
    def told(self) -> str:
        """With the server's name, for people."""
        return str(self) if self.server is None else f"server {self.server.name} at {self.server.url}: {self}"


class RequestRejected(Doubtful):
    """A 4xx that is the request's own fault, unless another server takes it. `blamed`: it was counted as the
    server's."""

    blamed = False


class ServerFailed(Exception):
    """A 5xx, a busy server, a lost connection or no answer in time: worth another server, or another try."""


class ServerUnfit(ServerFailed):
    """This server would answer every request so, others may not: it is left alone for a while."""


class ServerLeft(ServerFailed):
    """The server was taken out of service while the request ran; no failure of the request, nor of the server."""


class BadSample(Doubtful):
    """An answer that cannot be trained on, such as one without log-probs: a failure of the server. Never repaired."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class UnknownWeights(Exception):
    """Tokens of weights whose label is not a version of this run (`run_id`): the server was restarted, never
    updated, or serves another run."""

    def __init__(self, label: str, server: str, run_id: str = "") -> None:
        super().__init__(f"{server}: {describe_label(label, run_id)}")
        self.label = label
        self.server = server


class EpisodeFailed(Exception):
    """An episode cannot go on. `reason`: a code of `protocol.reasons`; `retryable` false: another try would fail
    alike; `kind`, `key`: as `Troubles.add` has them, the key None where the reason is; `where`: file:line of the user's
    code."""

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
    """The error for an HTTP status other than 200."""
    text = f"HTTP {status}: {message[:500]}"
    if status in _UNFIT:
        return ServerUnfit(f"{text}; is this a server that `slipstream vllm` started with this run file?")
    return RequestRejected(text) if 400 <= status < 500 and status not in _BUSY else ServerFailed(text)
