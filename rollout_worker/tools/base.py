"""Defines the `Tool` protocol, the result of a call, its conversion to text, and its metrics.

A tool has a schema, which the policy is shown, and a call that returns text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

from typing_extensions import TypeIs

from slipstream.protocol import reasons
from slipstream.protocol.rollouts import UNKNOWN_TOOL
from slipstream.rollout_worker.user_code import UserCodeError
from slipstream.rollout_worker.user_code.call import MAX_ITEMS
from slipstream.rollout_worker.user_code.values import MAX_CHARACTERS, bounded
from slipstream.rollout_worker.vision.messages import PARTS, seen_parts
from slipstream.rollout_worker.vision.processor import ImageProcessor
from slipstream.rollout_worker.vision.sources import is_picture

# Metrics use UNKNOWN for calls that name no tool, and OTHER for tools beyond the first MAX_COUNTED.
UNKNOWN, OTHER = UNKNOWN_TOOL, "other"

# MCP and models write names of tools like this. Other characters could forge the notation of calls.
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


# Text, or parts of text and images.
Content: TypeAlias = str | list[dict[str, Any]]

# A tool's name is part of a metric's name, so only this many tools are counted by name. All others count as OTHER.
MAX_COUNTED = 24

NAME_CHARACTERS = 64

# TRL accepts these parts of a message's content from a tool that returns a list.
_PARTS = ("text", "image", "image_url", "video", "audio")

_OR_SEE = "or set images.enabled = true for a model that sees (worker.tool_isolation = thread)"


class Tool(Protocol):
    """Defines one tool, such as a function, a method of an environment or a tool of an MCP server."""

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema for chat templates.

        It has the form `{"type": "function", "function": {"name", "description", "parameters"}}`.
        """

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> Content:
        """Call the tool.

        Args:
            arguments: Arguments that fit the schema.
            timeout_s: Maximum duration in seconds.

        Returns:
            The result as text, or as content parts where it has images.

        Raises:
            UserCodeError: Its code failed.
            ArgumentsError: The arguments are wrong in a way that only the tool itself can find.
        """


class ArgumentsError(ValueError):
    """Is raised for arguments that cannot be read or do not fit.

    Its text tells the policy which arguments are wrong and what the tool expects.
    """


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Holds the tool message that answers a call.

    Attributes:
        name: The tool's name in the message.
        content: Text of the message, or its parts where it has images.
        reason: Why the call failed, a code of `slipstream.protocol.reasons`; None if it did not fail.
        counted_as: The tool's name in metrics; `UNKNOWN` for a call that names no tool.
        coerced: Whether its arguments were converted to fit the schema.
        error: The error of the tool's own code; None if it raised none.
        call_id: Id of the call in the policy's notation; None if that has no ids.
        seconds: How long the call took; None for one that reached no tool.
        defused: Whether the answer held the text of special tokens. Such text was broken up.
    """

    name: str
    content: Content
    reason: str | None = None
    counted_as: str = UNKNOWN
    coerced: bool = False
    error: UserCodeError | None = None
    call_id: str | None = None
    defused: bool = False
    seconds: float | None = None

    @property
    def failed(self) -> bool:
        return self.reason is not None

    @property
    def answered(self) -> bool:
        """Return whether the call reached the tool.

        The content is then the tool's own, and not an error about the call.
        """
        return self.reason not in (reasons.TOOL_MALFORMED, reasons.TOOL_UNKNOWN, reasons.TOOL_ARGUMENTS)

    def message(self) -> dict[str, Any]:
        """Return the message, with the id of the call if it has one."""
        answers = {} if self.call_id is None else {"tool_call_id": self.call_id}
        return {"role": "tool", "name": self.name, "content": self.content, **answers}


def counted_as(name: str, counted: int) -> str:
    """Return a tool's name in metrics.

    Args:
        name: The tool's name.
        counted: Number of other tools that are already counted by name.
    """
    return name[:NAME_CHARACTERS] if counted < MAX_COUNTED else OTHER


def count_call(
    metrics: dict[str, float], tool: str, reason: str | None, coerced: bool, seconds: float | None = None
) -> None:
    """Add a call to metrics.

    Args:
        metrics: Counts by metric name, changed in place.
        tool: The tool's name in metrics.
        reason: Why the call failed, a code of `slipstream.protocol.reasons`; None if it did not fail.
        coerced: Whether its arguments were converted to fit the schema.
        seconds: How long it took; None if that is not known.
    """
    counts: dict[str, float] = {"calls": 1, "failures": int(reason is not None)}
    if reason is not None:
        counts[f"failures/{reason}"] = 1
    if coerced:
        counts["coerced"] = 1
    if seconds is not None:
        counts["seconds"] = seconds
    for what, count in counts.items():
        metric = f"tools/{tool}/{what}"
        metrics[metric] = metrics.get(metric, 0.0) + count


def as_text(result: object) -> str:
    """Convert a tool's result to the text that the policy reads, no longer than `bounded` allows.

    Text stays as it is. Lists, dicts, tuples, pydantic models and dataclasses become JSON where possible, and so do
    the items of a generator. A list of
    content parts becomes its texts. Everything else is written with `str`, so None becomes "None", as in TRL.

    Run this where user code runs, because it calls methods of the user's objects.

    Raises:
        ValueError: An iterator gives too many items.
        TypeError: The result holds bytes, images or other parts that the policy cannot read.
    """
    if isinstance(result, str):
        return bounded(result)
    if isinstance(result, bytes | bytearray | memoryview):
        raise TypeError(f"the tool returned {type(result).__name__}, and the policy reads text: decode it in the tool")
    if _is_iterator(result):
        return as_text(_collected(result))
    if type(result).__module__.partition(".")[0] == "PIL":
        raise TypeError(f"the tool returned an image, and the policy reads text: return a description of it, {_OR_SEE}")
    if _is_content(result):
        return bounded(_texts(result))
    if isinstance(result, list | dict | tuple) or _has_fields(result):
        try:
            return bounded(_as_json(result))
        except (TypeError, ValueError, RecursionError):
            pass
    return bounded(str(result))


def as_content(result: object, images: ImageProcessor | None) -> Content:
    """Convert a tool's result as `as_text` does, but for images, which the policy may see.

    Args:
        result: Anything; a PIL image, or a list of content parts, may hold images.
        images: Opens them; None for a policy that reads text alone.

    Raises:
        TypeError: As for `as_text`.
        ImageError: An image cannot be used.
    """
    if images is None:
        return as_text(result)
    result = _collected(result) if _is_iterator(result) else result
    each = result if isinstance(result, list | tuple) else [result]
    parts = [_part_of(part) for part in each]
    if None in parts or not any(part["type"] in PARTS for part in parts if part is not None):
        return as_text(result)
    return seen_parts(parts, images, bounded)


def _is_iterator(result: object) -> TypeIs[Iterator[Any]]:
    """Return whether a result is a generator or another iterator that has no text of its own."""
    return isinstance(result, Iterator) and type(result).__str__ is object.__str__


def _collected(items: Iterator[Any]) -> list[Any]:
    """Return the items of an iterator, as those of an async generator are collected."""
    found = list(islice(items, MAX_ITEMS + 1))
    if len(found) > MAX_ITEMS:
        raise ValueError(f"the tool's iterator gives more than {MAX_ITEMS} items; give fewer, or an end")
    return found


def _part_of(value: Any) -> dict[str, Any] | None:
    """Return what a tool gave as a part of a message; None if it is none."""
    if is_picture(value):
        return {"type": "image", "image": value}
    if isinstance(value, str):
        return {"type": "text", "text": value}
    is_part = isinstance(value, dict) and (value.get("type") in PARTS or isinstance(value.get("text"), str))
    return value if is_part and isinstance(value.get("type"), str) else None


def _as_json(result: object) -> str:
    """Write JSON piece by piece, up to the length that is kept.

    One call for the whole value would hold the interpreter lock until it ends.
    """
    pieces, size = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False, default=_jsonable).iterencode(result):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            pieces.append("... (the rest is left out)")
            break
    return "".join(pieces)


def _has_fields(value: object) -> bool:
    """Return whether a value is a pydantic model or a dataclass."""
    return not isinstance(value, type) and (
        hasattr(type(value), "__pydantic_serializer__") or hasattr(type(value), "__dataclass_fields__")
    )


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array or a number of numpy or torch
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
            or_see = f", {_OR_SEE}" if part["type"] in PARTS else ""
            raise TypeError(
                f"the tool returned content of type {part['type']!r}, and the policy reads text alone{or_see}"
            )
    return "\n".join(str(part["text"]) for part in parts)
