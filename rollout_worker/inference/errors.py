"""What can go wrong with a sample, one class for each way to react."""

from __future__ import annotations


class Rejected(Exception):
    """A 4xx: the request is wrong, on every server. Never tried again."""


class ServerFailed(Exception):
    """A 5xx, a lost connection or no answer in time: worth another server, or another try."""


class BadSample(Exception):
    """An answer that cannot be trained on, such as one without log-probs. Never repaired, never tried again."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class UnknownWeights(Exception):
    """Tokens of weights whose label is not a version of ours: the server was restarted, or never updated."""

    def __init__(self, label: str) -> None:
        super().__init__(f"weights labelled {label!r}")
        self.label = label


class EpisodeFailed(Exception):
    """An episode cannot go on. `reason`: a code of `protocol.reasons`; `retryable` false: another try would fail
    alike."""

    def __init__(self, reason: str, detail: str, retryable: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retryable = retryable


def error_of(status: int, message: str) -> Rejected | ServerFailed:
    """The error for an HTTP status other than 200."""
    kind = Rejected if 400 <= status < 500 else ServerFailed
    return kind(f"HTTP {status}: {message[:500]}")
