"""How a route of ours refuses."""

from __future__ import annotations


class RouteError(RuntimeError):
    """Answered as `{"error": {"message": ...}}` with the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
