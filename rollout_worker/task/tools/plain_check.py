"""A fast check for schemas of the plain kind: types, properties, items, a choice of types. It is some fifty times as
fast as a validator that could explain what it finds, which is asked only where this check says no or knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rollout_worker.task.tools.schema_form import NAMES

Check: TypeAlias = Callable[[Any], bool]

_IGNORED = {"title", "description", "default", "examples", "deprecated", "$defs", "definitions", "$comment", "readOnly"}
_KNOWN = {"type", "enum", "anyOf", "properties", "required", "additionalProperties", "items", *_IGNORED}
# JSON's names of types that a schema may give.
_TYPES = {name for names in NAMES.values() for name in names}


def plain_check(schema: Any, as_written: bool) -> Check | None:
    """Whether a JSON value is valid, exactly as the validator decides; None for a schema with more than is known here.
    `as_written`: a fraction such as 2.0 is no integer, so that a value that passes needs no change."""
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
        check = _object(schema, as_written)
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
        return None  # to JSON 1, 1.0 and true are not what they are to Python
    return lambda value: (value is None or isinstance(value, str)) and value in values


def _any_of(branches: Any, as_written: bool) -> Check | None:
    checks = [plain_check(branch, as_written) for branch in branches]
    known = [check for check in checks if check is not None]
    return (lambda value: any(check(value) for check in known)) if len(known) == len(checks) else None


def _items(part: Any, as_written: bool) -> Check | None:
    check = plain_check(part, as_written)
    return None if check is None else lambda value: not isinstance(value, list) or all(map(check, value))


def _object(schema: Mapping[str, Any], as_written: bool) -> Check | None:
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
