"""A request that the queue turns down, as the client will see it."""

from __future__ import annotations


class Refusal(Exception):
    """Becomes an HTTP answer with a `Problem` body: `reason` is a stable code, `message` says value and remedy."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
