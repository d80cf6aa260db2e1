"""Errors as OpenAI's API tells them: a status, and a body that its clients read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

INVALID, SERVER = "invalid_request_error", "server_error"
# What agents branch on: OpenAI's own code, and ours.
CONTEXT, TURNS, OVER = "context_length_exceeded", "turn_limit", "episode_over"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a request. `param`: where, such as messages[2].content."""

    param: str
    text: str
    code: str = "invalid_value"


class ApiError(Exception):
    """A request that is not answered. `params`: of each fault; `code`: for programs. No client should try again: what
    could help was tried here."""

    def __init__(
        self, status: int, message: str, code: str | None = None, params: Sequence[str] = (), kind: str = INVALID
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.params = list(params)
        self.kind = kind

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's form has one `param`; `params` names all of them."""
        param = self.params[0] if self.params else None
        error = {"message": str(self), "type": self.kind, "param": param, "code": self.code}
        return {"error": error if len(self.params) < 2 else {**error, "params": self.params}}


def refusal(faults: Sequence[Fault]) -> ApiError:
    """400 for all the faults of a request at once."""
    message = "; ".join(f"{fault.param}: {fault.text}" for fault in faults)
    return ApiError(400, message, faults[0].code, [fault.param for fault in faults])


def over() -> ApiError:
    return ApiError(410, "the episode of this key is over: its agent has returned, raised or timed out", OVER)
