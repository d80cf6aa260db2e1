"""What a tool returned, as the text that the policy reads."""

from __future__ import annotations

import json
from typing import Any

from rollout_worker.user_code.texts import MAX_CHARACTERS, bounded

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
