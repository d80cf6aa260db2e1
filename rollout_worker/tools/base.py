"""What a tool is: a schema that the policy is shown, and a call that gives text; and what becomes of a call.

Calls of tools as a rollout's metrics count them: by tool, and failures by reason too.

What a tool returned, as the text that the policy reads.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from protocol import reasons
from rollout_worker.user_code import UserCodeError
from rollout_worker.user_code.values import MAX_CHARACTERS, bounded

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


# A tool's name is part of a metric's: so many are counted by name, all others together.
MAX_COUNTED = 24

NAME_CHARACTERS = 64


def counted_as(name: str, counted: int) -> str:
    """What calls of a tool are counted as, where `counted` others are counted by name."""
    return name[:NAME_CHARACTERS] if counted < MAX_COUNTED else OTHER


def count_call(metrics: dict[str, float], tool: str, reason: str | None, coerced: bool) -> None:
    """`tool`: what it is counted as; reason: why it failed, a code of `protocol.reasons`, None if it did not; coerced:
    its arguments were read although they were not as the schema asks."""
    counts = {"calls": 1, "failures": int(reason is not None)}
    if reason is not None:
        counts[f"failures/{reason}"] = 1
    if coerced:
        counts["coerced"] = 1
    for what, count in counts.items():
        figure = f"tools/{tool}/{what}"
        metrics[figure] = metrics.get(figure, 0.0) + count


# Parts of a message's content, as TRL takes them from a tool that returns a list.
_PARTS = ("text", "image", "image_url", "video", "audio")


def as_text(result: object) -> str:
    """Text as it is; lists, dicts, pydantic models and dataclasses as JSON where possible; all else as Python writes
    it, so None as "None", as in TRL. A list of content parts is its texts. Raises `TypeError` for bytes, images and
    other parts, which the policy cannot read. No longer than `bounded` leaves it. It calls the user's objects, so it
    runs where user code runs."""
    if isinstance(result, str):
        return bounded(result)
    if isinstance(result, bytes | bytearray | memoryview):
        raise TypeError(f"the tool returned {type(result).__name__}, and the policy reads text: decode it in the tool")
    if type(result).__module__.partition(".")[0] == "PIL":
        raise TypeError("the tool returned an image, and the policy reads text: return a description of it")
    if _is_content(result):
        return bounded(_texts(result))
    if isinstance(result, list | dict | tuple) or _has_fields(result):
        try:
            return bounded(_as_json(result))
        except (TypeError, ValueError, RecursionError):
            pass
    return bounded(str(result))


def _as_json(result: object) -> str:
    """Its beginning, where it is longer than would be kept. Piece by piece: in one piece, other threads would wait for
    all of it."""
    pieces, size = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False, default=_jsonable).iterencode(result):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            pieces.append("... (the rest is left out)")
            break
    return "".join(pieces)


def _has_fields(value: object) -> bool:
    """A pydantic model or a dataclass."""
    return not isinstance(value, type) and (
        hasattr(type(value), "__pydantic_serializer__") or hasattr(type(value), "__dataclass_fields__")
    )


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array or a number of numpy's or torch's
        return value.tolist()
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return to_jsonable_python(value)
    except PydanticSerializationError as error:
        raise TypeError(str(error)) from None


def _is_content(result: object) -> bool:
    return (
        isinstance(result, list)
        and bool(result)
        and all(isinstance(part, dict) and part.get("type") in _PARTS and part["type"] in part for part in result)
    )


def _texts(parts: Any) -> str:
    for part in parts:
        if part["type"] != "text":
            raise TypeError(f"the tool returned content of type {part['type']!r}, and the policy reads text alone")
    return "\n".join(str(part["text"]) for part in parts)
