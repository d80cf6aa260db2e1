"""What the decisions turn down: a reason and a message, no HTTP."""

from __future__ import annotations


class Refusal(Exception):
    """A request that is turned down: `reason` is a code of `protocol.reasons`, `message` names value and remedy."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
