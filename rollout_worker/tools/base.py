"""What a tool is: a schema that the policy is shown, and a call that gives text; and what becomes of a call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from protocol import reasons
from rollout_worker.user_code import UserCodeError

# What a call is counted as that names no tool, and calls of the tools that are too many to be counted by name.
UNKNOWN, OTHER = "unknown", "other"

# A tool's name, as MCP has it and models write it; anything else would forge the notation of calls.
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Tool(Protocol):
    """One tool, whatever is behind it: a function, a method of an environment, an MCP server."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that a chat template gets: `{"type": "function", "function": {"name", "description",
        "parameters"}}`."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """The result as text, for arguments that fit the schema. Raises `UserCodeError`, and `ArgumentsError` for
        arguments that only the tool itself could find wrong."""


class ArgumentsError(ValueError):
    """Arguments that cannot be read, or do not fit; the text tells the policy which, and what is expected."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The tool message that answers a call. `reason`: why the call failed, a code of `protocol.reasons`, None if it did
    not; `counted_as`: the tool's name in metrics, `UNKNOWN` of a call that names no tool; `coerced`: its arguments were
    read although they were not as the schema asks; `error`: what the tool's own code raised; `defused`: the tool
    answered with the text of special tokens, which was broken."""

    name: str
    content: str
    reason: str | None = None
    counted_as: str = UNKNOWN
    coerced: bool = False
    error: UserCodeError | None = None
    call_id: str | None = None
    defused: bool = False

    @property
    def failed(self) -> bool:
        return self.reason is not None

    @property
    def answered(self) -> bool:
        """Whether the content is the tool's, and not ours about a call that did not reach it."""
        return self.reason not in (reasons.TOOL_MALFORMED, reasons.TOOL_UNKNOWN, reasons.TOOL_ARGUMENTS)

    def message(self) -> dict[str, str]:
        """With the id of the call that it answers, if that had one."""
        answers = {} if self.call_id is None else {"tool_call_id": self.call_id}
        return {"role": "tool", "name": self.name, "content": self.content, **answers}
