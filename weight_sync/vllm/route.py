"""What a route of ours is: a coroutine from the engine's client and the JSON body to the JSON answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Handler = Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]


class RouteError(Exception):
    """A refusal, answered with `status` and `message`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
