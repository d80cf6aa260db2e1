"""Tools: a schema that the policy is shown and a call that returns text; the result of a call; and its metrics."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from protocol import reasons
from rollout_worker.user_code import UserCodeError
from rollout_worker.user_code.values import MAX_CHARACTERS, bounded

# Names in metrics for calls that name no tool, and for calls of tools beyond the first MAX_COUNTED.
UNKNOWN, OTHER = "unknown", "other"

# Names of tools as in MCP and as models write them. Other characters could forge the notation of calls.
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Tool(Protocol):
    """One tool, whatever is behind it: a function, a method of an environment, an MCP server."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema for chat templates: `{"type": "function", "function": {"name", "description",
        "parameters"}}`."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call the tool with arguments that fit the schema. Returns its result as text.

        Raises:
            UserCodeError: Its code failed.
            ArgumentsError: Only the tool itself could find the arguments wrong.
        """


class ArgumentsError(ValueError):
    """Arguments that cannot be read or do not fit. The text tells the policy which, and what is expected."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The tool message that answers a call.

    Attributes:
        reason: Why the call failed, a code of `protocol.reasons`; None if it did not fail.
        counted_as: The tool's name in metrics; `UNKNOWN` for a call that names no tool.
        coerced: Whether its arguments were converted to fit the schema.
        error: The error of the tool's own code.
        call_id: Id of the call in the policy's notation; None where it has none.
        defused: Whether the answer held the text of special tokens, which was broken.
    """

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
        """Whether the content is the tool's own, and not an error about a call that never reached it."""
        return self.reason not in (reasons.TOOL_MALFORMED, reasons.TOOL_UNKNOWN, reasons.TOOL_ARGUMENTS)

    def message(self) -> dict[str, str]:
        """Return the message, with the id of the call if it has one."""
        answers = {} if self.call_id is None else {"tool_call_id": self.call_id}
        return {"role": "tool", "name": self.name, "content": self.content, **answers}


# Tools that are counted by name, as a tool's name is part of a metric's; all others are counted together.
MAX_COUNTED = 24

NAME_CHARACTERS = 64


def counted_as(name: str, counted: int) -> str:
    """Return the name in metrics of a tool, where `counted` other tools are counted by name."""
    return name[:NAME_CHARACTERS] if counted < MAX_COUNTED else OTHER


def count_call(metrics: dict[str, float], tool: str, reason: str | None, coerced: bool) -> None:
    """Add a call to metrics.

    Args:
        tool: The tool's name in metrics.
        reason: Why the call failed, a code of `protocol.reasons`; None if it did not fail.
        coerced: Whether its arguments were converted to fit the schema.
    """
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
    """Convert a tool's result to the text that the policy reads, no longer than `bounded` allows.

    Text stays as it is. Lists, dicts, pydantic models and dataclasses become JSON where possible, a list of content
    parts becomes its texts, and everything else is written as Python does, so None becomes "None", as in TRL. It calls
    the user's objects, so it runs where user code runs.

    Raises:
        TypeError: Bytes, images and other parts that the policy cannot read.
    """
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
    """Write JSON up to the length that is kept, piece by piece: written at once it would hold the interpreter lock."""
    pieces, size = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False, default=_jsonable).iterencode(result):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            pieces.append("... (the rest is left out)")
            break
    return "".join(pieces)


def _has_fields(value: object) -> bool:
    """Return whether it is a pydantic model or a dataclass."""
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
