"""Reads arguments that the policy wrote as text, and checks values quickly against simple schemas.

Sampled text may be anything. The time to read it grows only with its length. Whatever error Python's own readers
raise, `read_arguments` raises only `ArgumentsError`.

The fast check knows types, properties, items, enums and `anyOf`. It is about fifty times as fast as a validator that
can explain its findings. That validator runs only where the fast check fails a value or does not know the schema.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from slipstream.rollout_worker.tools.base import ArgumentsError
from slipstream.rollout_worker.tools.schema import NAMES

_FENCE = "```"

# Models sometimes quote JSON inside JSON. Deeper than this it is not intended.
_MAX_QUOTED = 3

# `ast.literal_eval` needs far more memory than the text itself.
_MAX_LITERAL_CHARACTERS = 64 * 1024

_SHOWN_CHARACTERS = 80

# Text in quotes, where no pair begins. An apostrophe within a word is no quote. The group `open` matches if the text
# ends inside the quotes.
_QUOTED = r"""(?<![\w\\])(?:"(?:[^"\\]|\\.?)*+(?:"|(?P<open>\Z))|'(?:[^'\\]|\\.?|'(?=\w))*+(?:'|(?P<open_single>\Z)))"""

# What JSON or Python reads as an escape. Escaped quotes are not among them, because every writer means these.
_ESCAPE = re.compile(r"\\[abfnrtvxuUN0-7\n]")

_IGNORED = {"title", "description", "default", "examples", "deprecated", "$defs", "definitions", "$comment", "readOnly"}

_KNOWN = {"type", "enum", "anyOf", "properties", "required", "additionalProperties", "items", *_IGNORED}

# JSON's names of types that a schema may use.
_TYPES = {name for names in NAMES.values() for name in names}


def read_arguments(text: str, names: Collection[str]) -> dict[str, Any]:
    """Read the arguments of a call from text.

    Accepts a JSON object, with or without braces, in a code fence or in quotes; a Python literal; or pairs such as
    `a: 1, b: 2`. A text in JSON may contain line breaks as they are. Nothing is guessed: a value that begins like JSON
    and cannot be read makes the whole unreadable.

    Args:
        text: Text of the arguments. Empty text means no arguments.
        names: Names of the tool's parameters. Only these can begin a pair.

    Returns:
        The arguments by name.

    Raises:
        ArgumentsError: The text has none of these forms.
    """
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
    """Read a value from JSON or a Python literal.

    Backslashes that are no escapes, as in `"\\d+"`, are read as they stand. Next to others, as in `"C:\\new\\dir"`,
    nobody knows which are meant as escapes.

    Raises:
        ValueError: The text is neither, or is too long for a Python literal.
    """
    try:
        return json.loads(text, strict=False)
    except RecursionError:
        pass
    except ValueError as error:
        if "escape" in str(error) and _ESCAPE.search(text.replace(r"\\", "")) is not None:
            raise
    if len(text) > _MAX_LITERAL_CHARACTERS:
        raise ValueError("too long")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


def short(given: Any) -> str:
    """Write a value for a message, cut at 80 characters."""
    try:
        text = repr(given) if not isinstance(given, str) else repr(given[: 2 * _SHOWN_CHARACTERS])
    except (ValueError, RecursionError):  # Python refuses to write numbers that are too long
        text = f"a {type(given).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _without_fence(text: str) -> str:
    if not (text.startswith(_FENCE) and text.endswith(_FENCE) and len(text) > 2 * len(_FENCE)):
        return text
    text = text[len(_FENCE) : -len(_FENCE)]
    language, newline, rest = text.partition("\n")
    return (rest if newline and language.strip().isalnum() else text.removeprefix("json")).strip()


def _read_object(text: str) -> dict[str, Any] | None:
    for _ in range(_MAX_QUOTED):
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
    """Read `a: 1, b: 2`, `a=1` or one pair a line.

    Only a parameter's name begins a pair, because values may hold commas and colons.

    Returns:
        The values by name; None if the text does not begin with a pair.
    """
    if not names:
        return None
    is_object = text.startswith("{") and text.endswith("}")
    if is_object:
        text = text[1:-1].strip()
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    begin = rf"(?:^|[,;\n])[ \t]*[\"']?(?P<name>{alternatives})[\"']?[ \t]*[:=]"
    found = list(re.finditer(rf"{begin}|{_QUOTED}", text, re.DOTALL))
    if any(part["open"] is not None or part["open_single"] is not None for part in found):
        return None
    begins = [part for part in found if part["name"] is not None]
    if not begins or begins[0].start() > 0:
        return None
    ends = [begin.start() for begin in begins[1:]] + [len(text)]
    # If a name is repeated, the last value counts. Only that one is read, so repeats cost no time.
    texts = {begin["name"]: text[begin.end() : end].strip(" \t\r\n,;") for begin, end in zip(begins, ends, strict=True)}
    try:
        values = {name: _plain(written) for name, written in texts.items()}
    except ValueError:
        return None
    # In braces, what has a mark of JSON and is no JSON is no text either: two objects, or a comma that is missing.
    unread = (written for name, written in texts.items() if values[name] == written)
    return None if is_object and any(not {*'{}[]"\\'}.isdisjoint(written) for written in unread) else values


def _plain(text: str) -> Any:
    """Read a value from JSON or a Python literal; return the text itself if it begins like neither.

    Raises:
        ValueError: The text begins like a value and cannot be read as one.
    """
    try:
        return read_value(text)
    except ValueError:
        if text.startswith(('"', "'", "[", "{", "(")):
            raise
        return text


Check: TypeAlias = Callable[[Any], bool]


def plain_check(schema: Any, as_written: bool) -> Check | None:
    """Build a fast check that decides exactly as the validator does whether a JSON value is valid.

    Args:
        schema: A JSON schema, or True or False.
        as_written: Whether to refuse a float such as 2.0 as an integer. A value that passes then needs no change.

    Returns:
        The check; None if the schema uses keywords that are not known here.
    """
    if isinstance(schema, bool):
        return (lambda value: True) if schema else (lambda value: False)
    if not isinstance(schema, Mapping) or not schema.keys() <= _KNOWN:
        return None
    checks: list[Check] = []
    for name, given in schema.items():
        if name in _IGNORED or name in ("properties", "required", "additionalProperties"):
            continue
        check = _OF[name](given, as_written)
        if check is None:
            return None
        checks.append(check)
    if schema.keys() & {"properties", "required", "additionalProperties"}:
        check = _check_object(schema, as_written)
        if check is None:
            return None
        checks.append(check)
    if len(checks) == 1:
        return checks[0]
    return lambda value: all(check(value) for check in checks)


def _type(kinds: Any, as_written: bool) -> Check | None:
    names = {kinds} if isinstance(kinds, str) else set(kinds)
    if not names <= _TYPES:
        return None
    taken = {kind for kind, of_kind in NAMES.items() if not names.isdisjoint(of_kind)}
    if "integer" in names and float not in taken and not as_written:
        return lambda value: type(value) in taken or (isinstance(value, float) and value.is_integer())
    return lambda value: type(value) in taken


def _enum(values: Any, as_written: bool) -> Check | None:
    if not all(isinstance(value, str) or value is None for value in values):
        return None  # JSON and Python differ on which of 1, 1.0 and true are equal
    return lambda value: (value is None or isinstance(value, str)) and value in values


def _any_of(branches: Any, as_written: bool) -> Check | None:
    checks = [plain_check(branch, as_written) for branch in branches]
    known = [check for check in checks if check is not None]
    return (lambda value: any(check(value) for check in known)) if len(known) == len(checks) else None


def _items(part: Any, as_written: bool) -> Check | None:
    check = plain_check(part, as_written)
    return None if check is None else lambda value: not isinstance(value, list) or all(map(check, value))


def _check_object(schema: Mapping[str, Any], as_written: bool) -> Check | None:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    others = plain_check(schema.get("additionalProperties", True), as_written)
    checks = {name: plain_check(part, as_written) for name, part in properties.items()}
    if others is None or None in checks.values():
        return None
    known = {name: check for name, check in checks.items() if check is not None}

    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return True
        return all(name in value for name in required) and all(
            known.get(name, others)(each) for name, each in value.items()
        )

    return check


_OF: dict[str, Callable[[Any, bool], Check | None]] = {
    "type": _type,
    "enum": _enum,
    "anyOf": _any_of,
    "items": _items,
}
