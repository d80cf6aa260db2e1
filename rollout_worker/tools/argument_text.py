"""Arguments that the policy wrote as text: read as what they are meant to be, where that is plain.

Sampled text may be anything. Nothing here takes more than a time that grows with its length, and whatever Python's own
readers make of it, only `ArgumentsError` leaves.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from rollout_worker.tools.base import ArgumentsError

_FENCE = "```"

# JSON in JSON in JSON: further in, nobody meant it.
_MOST_QUOTED = 3

# Python's own reader takes far more memory than text.
_MOST_LITERAL_CHARACTERS = 64 * 1024

_SHOWN_CHARACTERS = 80


def read_arguments(text: str, names: Collection[str]) -> dict[str, Any]:
    """The arguments that `text` writes: a JSON object, with or without braces, in a code fence or in quotes, a Python
    literal, or pairs such as `a: 1, b: 2` of the parameters `names`; no text is no arguments. Raises
    `ArgumentsError`."""
    inner = _without_fence(text.strip())
    if not inner:
        return {}
    for found in (_read_object(inner), _read_object(f"{{{inner.strip(',')}}}"), _pairs(inner, names)):
        if found is not None:
            return found
    raise ArgumentsError(
        f'the arguments are not a JSON object: {short(text)}; write them as {{"name": value}}, with the names and '
        f"types of the tool's parameters"
    )


def read_value(text: str) -> Any:
    """What `text` writes in JSON or as a Python literal. Raises `ValueError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if len(text) > _MOST_LITERAL_CHARACTERS:
        raise ValueError("too long")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


def short(given: Any) -> str:
    """A value for a message, cut at 80 characters."""
    try:
        text = repr(given) if not isinstance(given, str) else repr(given[: 2 * _SHOWN_CHARACTERS])
    except (ValueError, RecursionError):  # a number too long to be written
        text = f"a {type(given).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _without_fence(text: str) -> str:
    if not (text.startswith(_FENCE) and text.endswith(_FENCE) and len(text) > 2 * len(_FENCE)):
        return text
    text = text[len(_FENCE) : -len(_FENCE)]
    language, newline, rest = text.partition("\n")
    return (rest if newline and language.strip().isalnum() else text.removeprefix("json")).strip()


def _read_object(text: str) -> dict[str, Any] | None:
    for _ in range(_MOST_QUOTED):
        try:
            found = read_value(text)
        except ValueError:
            return None
        if found is None:
            return {}
        if isinstance(found, dict):
            return found
        if not isinstance(found, str):
            return None
        text = found
    return None


def _pairs(text: str, names: Collection[str]) -> dict[str, Any] | None:
    """`a: 1, b: 2`, `a=1` or one a line. Only a parameter's name begins a pair: values may hold commas and colons."""
    if not names:
        return None
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    begins = list(re.finditer(rf"(?:^|[,;\n])[ \t]*[\"']?({alternatives})[\"']?[ \t]*[:=]", text))
    if not begins or begins[0].start() > 0:
        return None
    ends = [begin.start() for begin in begins[1:]] + [len(text)]
    # Of a name that is written again and again the last value counts, and only that is read.
    texts = {begin[1]: text[begin.end() : end] for begin, end in zip(begins, ends, strict=True)}
    return {name: _plain(written.strip(" \t\r\n,;")) for name, written in texts.items()}


def _plain(text: str) -> Any:
    """A value as JSON or Python write it; else the text itself."""
    try:
        return read_value(text)
    except ValueError:
        return text
