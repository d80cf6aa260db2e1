"""Reads the arguments of a call, converts them to the tool's schema where the intention is clear, and checks them.

The policy may write anything, and schemas may come from a server. Therefore only `ArgumentsError` is raised for a
call, and size and time are bounded. The tool itself checks patterns
and similar keywords, because such a check may never end.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators
from referencing import Registry

from slipstream.rollout_worker.tools import argument_text
from slipstream.rollout_worker.tools.argument_text import Check, plain_check, short
from slipstream.rollout_worker.tools.base import ArgumentsError
from slipstream.rollout_worker.tools.schema import allows, checked_form, resolved, types_of
from slipstream.rollout_worker.user_code.values import encodable

MAX_DEPTH = 64

MAX_BITS = 4096

# Bounds, for each value of the arguments, how many references one check follows and how many values it tries to fit.
# Without it, a schema that refers to itself in two ways would take time exponential in the depth.
MAX_STEPS_A_VALUE = 20

_STEPS_AT_LEAST = 1000

_STEPS_AT_MOST = 200_000

_MESSAGE_CHARACTERS = 400

# The repair of a value that stands where a list of such values is expected.
_SINGLE = "single value"

# How templates that write every value as text write null.
_NULLS = ("null", "None")


@dataclass(frozen=True, slots=True)
class Weight:
    """Counts the size of a JSON value.

    Attributes:
        values: Number of values in it, itself included.
        characters: Number of characters in its texts and names.
    """

    values: int
    characters: int

    def exceeds(self, most: Weight) -> bool:
        return self.values > most.values or self.characters > most.characters


def weigh(value: Any, most: Weight) -> Weight:
    """Count the size of `value`, and stop as soon as the count exceeds `most`.

    Returns:
        The weight of `value`. If it exceeds `most`, the weight of the part that was counted, which exceeds it too.
    """
    values = characters = 0
    left = [value]
    while left:
        each = left.pop()
        values += 1
        if isinstance(each, str):
            characters += len(each)
        elif isinstance(each, Mapping):
            characters += sum(len(name) for name in each if isinstance(name, str))
            left.extend(each.values())
        elif isinstance(each, list | tuple):
            left.extend(each)
        if values > most.values or characters > most.characters:
            break
    return Weight(values, characters)


# Arguments above `MOST` are refused. Arguments above `SMALL` would block the event loop.
MOST = Weight(values=100_000, characters=1_000_000)

SMALL = Weight(values=256, characters=2048)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Holds arguments that fit their schema.

    Attributes:
        values: The arguments by name.
        repairs: A short label for each change that made them fit.
    """

    values: dict[str, Any]
    repairs: tuple[str, ...] = ()


class _TooManySteps(Exception):
    pass


class _Steps(threading.local):
    """Counts the steps left to the check in this thread.

    It is local to the thread because calls of one tool are checked at the same time.
    """

    left = 0

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _TooManySteps

    def allow(self, value: Any) -> None:
        self.left = min(_STEPS_AT_MOST, self.left + MAX_STEPS_A_VALUE * weigh(value, MOST).values)


_steps = _Steps()


def _counted_ref(validator: Any, ref: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    _steps.take()
    yield from Draft202012Validator.VALIDATORS["$ref"](validator, ref, instance, schema)


_Validator = validators.extend(Draft202012Validator, {"$ref": _counted_ref})


def small(given: Mapping[str, Any] | str) -> bool:
    """Return whether arguments are small enough to be fitted in about a millisecond."""
    return not weigh(given, SMALL).exceeds(SMALL)


class Parameters:
    """Converts and checks arguments for one tool.

    Args:
        schema: JSON schema of the tool's parameters.
        strict: Whether to refuse names that the schema does not have.

    Raises:
        SchemaError: `schema` is not a JSON schema.
    """

    def __init__(self, schema: Mapping[str, Any], strict: bool) -> None:
        self._schema = {"type": "object", **checked_form(schema), **({"additionalProperties": False} if strict else {})}
        Draft202012Validator.check_schema(self._schema)
        self.names = tuple(self._schema.get("properties", {}))
        # The registry is empty so that addresses in a schema are never looked up.
        self._validator = _Validator(self._schema, registry=Registry())
        self._fits_as_written = plain_check(self._schema, as_written=True)
        # Keyed by the id of each part of the schema. Ids stay valid because the schema lives as long as this object.
        self._checks: dict[int, Check | None] = {}

    def fit(self, given: Mapping[str, Any] | str, as_text: bool = False) -> Arguments:
        """Convert arguments to the types of the schema.

        Args:
            given: The arguments by name, or the text of them.
            as_text: The policy wrote each value as text without quotes. Null, a list and an object then count before
                their text, if the schema allows both.

        Raises:
            ArgumentsError: They cannot be read, are too large or nested too deeply, or do not fit the schema.
        """
        repairs: list[str] = []
        _refuse_too_large(given)
        if isinstance(given, str):
            repairs.append("text")
            given = argument_text.read_arguments(given, self.names)
            _refuse_too_large(given)
        values = _clean(dict(given), "", 0, repairs)
        meant = self._meant(values) if as_text else {}
        if not meant and self._fits_as_written is not None and self._fits_as_written(values):
            return Arguments(values, tuple(repairs))
        try:
            _steps.left = _STEPS_AT_LEAST
            _steps.allow(values)
            values = {name: self._of_either(text, meant, name, repairs) for name, text in values.items()}
            values = self._fit(values, self._schema, repairs)
            _steps.left = _STEPS_AT_LEAST
            _steps.allow(values)
            valid = self._is_valid(values, self._schema)
            problem = None if valid else next(self._validator.iter_errors(values), None)
        except RecursionError:
            raise ArgumentsError("bad arguments: they are nested too deeply to be checked") from None
        except _TooManySteps:
            raise ArgumentsError(
                "bad arguments: their check takes too many steps; write fewer or simpler values"
            ) from None
        except ArgumentsError:
            raise
        # The schema may be unusable on this value, such as a reference to nowhere. The tool itself checks then.
        except Exception:
            problem = None
        if problem is not None:
            raise ArgumentsError(f"bad arguments: {_explained(problem)}")
        return Arguments(values, tuple(repairs))

    async def fitted(self, given: Mapping[str, Any] | str, as_text: bool = False) -> Arguments:
        """Fit as `fit` does, large arguments in a thread because they would block the event loop."""
        if small(given):
            return self.fit(given, as_text)
        arguments: Arguments = await asyncio.to_thread(self.fit, given=given, as_text=as_text)
        return arguments

    def without_nulls(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of a data set's call without each null that the schema does not allow, and with null for
        each missing one that is required and may be null.

        A table fills up calls that differ in their arguments with null, and where all nulls were taken out again, those
        that were meant are missing. An argument that the schema does not name counts as not allowed, unless the schema
        says that it takes others.
        """
        return self._without_nulls(values, self._schema)  # type: ignore[no-any-return]

    def _without_nulls(self, value: Any, schema: Any) -> Any:
        schema = resolved(schema, self._schema)
        if not isinstance(schema, dict) or not isinstance(value, Mapping | list):
            return value
        branches = [resolved(branch, self._schema) for branch in schema.get("anyOf") or schema.get("oneOf") or ()]
        branches = [branch for branch in branches if allows(types_of(branch) or set(), value)]
        if branches:
            return self._without_nulls(
                value, next((each for each in branches if self._may_be(value, each)), branches[0])
            )
        if isinstance(value, list):
            return [self._without_nulls(each, schema.get("items", True)) for each in value]
        properties = schema.get("properties")
        others = schema.get("additionalProperties", properties is None)
        required = [name for name in schema.get("required", ()) if name in (properties or {})]
        parts = {name: (properties or {}).get(name, others) for name in (*value, *required)}
        return {
            name: self._without_nulls(each, parts[name])
            for name, each in {**value, **{name: value.get(name) for name in required}}.items()
            if each is not None or self._takes(None, parts[name])
        }

    def _may_be(self, value: Any, schema: dict[str, Any]) -> bool:
        """Return whether the fields of an object that are neither null nor nested are those of `schema`."""
        if not isinstance(value, Mapping) or (properties := schema.get("properties")) is None:
            return True
        others = schema.get("additionalProperties", False)
        fields = {name: each for name, each in value.items() if each is not None}
        return all(
            self._takes(each, properties.get(name, others))
            for name, each in fields.items()
            if name not in properties or not isinstance(each, Mapping | list)
        )

    def _takes(self, value: Any, schema: Any) -> bool:
        _steps.left = _STEPS_AT_LEAST
        try:
            return self._is_valid(value, schema)
        except Exception:  # The schema may be unusable, such as a reference to nowhere. The value then stays.
            return True

    def _meant(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return null, lists and objects that stand as text where the schema allows them next to text, by name."""
        meant: dict[str, Any] = {}
        for name, text in values.items():
            part = resolved(self._schema.get("properties", {}).get(name), self._schema)
            if not isinstance(part, dict) or not isinstance(text, str):
                continue
            branches = part.get("anyOf") or part.get("oneOf") or [part]
            types = set[str]().union(*(types_of(resolved(branch, self._schema)) or () for branch in branches))
            if "string" not in types:  # others are converted anyway
                continue
            if "null" in types and text.strip() in _NULLS:
                meant[name] = None
            elif types & {"array", "object"} and text.lstrip().startswith(("[", "{")):
                with suppress(ValueError, RecursionError):
                    meant[name] = _clean(json.loads(text), "", 0, [])
        return meant

    def _of_either(self, text: Any, meant: Mapping[str, Any], name: str, repairs: list[str]) -> Any:
        """Return the value that is meant by `text`, if there is one that fits; otherwise `text`."""
        if name not in meant:
            return text
        part, tried = self._schema["properties"][name], list[str]()
        _refuse_too_large(meant[name])
        _steps.allow(meant[name])
        value = self._fit(meant[name], part, tried)
        if not self._is_valid(value, part):
            return text
        repairs += [*tried, "text of a value"]
        return value

    def _is_valid(self, value: Any, schema: Any) -> bool:
        if id(schema) not in self._checks:
            self._checks[id(schema)] = plain_check(schema, as_written=False)
        if (check := self._checks[id(schema)]) is not None:
            return check(value)
        return bool(self._validator.evolve(schema=schema).is_valid(value))

    def _fit(self, value: Any, schema: Any, repairs: list[str]) -> Any:
        """Convert `value` to the types of `schema` where the intention is clear; otherwise return it unchanged."""
        _steps.take()
        schema = resolved(schema, self._schema)
        if not isinstance(schema, dict):
            return value
        for part in schema.get("allOf", ()):
            value = self._fit(value, part, repairs)
        if branches := schema.get("anyOf", schema.get("oneOf")):
            return self._fit_any(value, branches, repairs)
        types = types_of(schema)
        listed = "enum" in schema or "const" in schema
        if types and (
            not allows(types, value) or (listed and isinstance(value, str) and not self._is_valid(value, schema))
        ):
            value = self._retyped(value, types, schema, repairs)
        elif isinstance(value, float) and types and "integer" in types and "number" not in types:
            repairs.append("integer")
            value = int(value)
        if isinstance(value, dict):
            return self._fit_object(value, schema, repairs)
        return self._fit_array(value, schema, repairs) if isinstance(value, list) else value

    def _fit_any(self, value: Any, branches: list[Any], repairs: list[str]) -> Any:
        for branch in branches:
            if self._is_valid(value, branch):
                return self._fit(value, branch, repairs)
        single: tuple[Any, list[str]] | None = None
        for branch in branches:
            tried: list[str] = []
            fitted = self._fit(value, branch, tried)
            if not tried or not self._is_valid(fitted, branch):
                continue
            if _SINGLE not in tried:
                break
            single = single or (fitted, tried)  # the text of null is null before it is a list's only item
        else:
            fitted, tried = single or (value, [])
        repairs += tried
        return fitted

    def _retyped(self, value: Any, types: set[str], schema: Mapping[str, Any], repairs: list[str]) -> Any:
        if isinstance(value, str):
            found = _from_text(value, types)
            if found is not value:
                repairs.append("text of a value")
                _refuse_too_large(found)
                _steps.allow(found)
                return found
            if value.lstrip().startswith(("[", "{")):
                return value
        if "array" in types and value is not None:
            tried: list[str] = []
            fitted = self._fit(value, schema.get("items", True), tried)
            if self._is_valid(fitted, schema.get("items", True)):
                repairs += [*tried, _SINGLE]
                return [fitted]
        return value

    def _fit_object(self, value: dict[str, Any], schema: Mapping[str, Any], repairs: list[str]) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        others = schema.get("additionalProperties", True)
        fitted = {}
        for name, given in value.items():
            part = properties.get(name, others)
            if given is None and name in properties and name not in required and not self._is_valid(None, part):
                repairs.append("null for a default")
                continue
            fitted[name] = self._fit(given, part, repairs) if isinstance(part, dict) else given
        return fitted

    def _fit_array(self, value: list[Any], schema: Mapping[str, Any], repairs: list[str]) -> list[Any]:
        first, others = schema.get("prefixItems", ()), schema.get("items", True)
        if not first and not isinstance(others, dict):
            return value
        return [
            self._fit(each, first[place] if place < len(first) else others, repairs) for place, each in enumerate(value)
        ]


def _refuse_too_large(given: Any) -> None:
    if weigh(given, MOST).exceeds(MOST):
        raise ArgumentsError(
            f"bad arguments: they are too large, at most {MOST.values} values and {MOST.characters} characters are "
            f"taken; write fewer"
        )


def _clean(value: Any, where: str, depth: int, repairs: list[str]) -> Any:
    """Convert `value` to one that JSON and UTF-8 can write: replace lone surrogates, and turn tuples into lists.

    Raises:
        ArgumentsError: It holds something else that is not JSON, or is nested too deeply.
    """
    if isinstance(value, str):
        if value.isascii() or value == (plain := encodable(value)):
            return value
        repairs.append("surrogate")
        return plain
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ArgumentsError(f"bad arguments: {where}the number is too long")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ArgumentsError(f"bad arguments: {where}{value} is not a number that JSON can write")
        return value
    if depth >= MAX_DEPTH:
        raise ArgumentsError(f"bad arguments: they are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {
            _clean(name if isinstance(name, str) else short(name), where, depth + 1, repairs): _clean(
                each, f"{where}{short(name)}: ", depth + 1, repairs
            )
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_clean(each, where, depth + 1, repairs) for each in value]
    raise ArgumentsError(f"bad arguments: {where}{short(value)} is a {type(value).__name__}, which is not JSON")


def _from_text(text: str, types: set[str]) -> Any:
    """Read a value of one of `types` from `text`; return `text` itself if there is none."""
    lowered = text.strip().lower()
    if "boolean" in types and lowered in ("true", "false"):
        return lowered == "true"
    if "null" in types and lowered in ("null", "none", ""):
        return None
    try:
        found = argument_text.read_value(text.strip())
        if isinstance(found, tuple):
            found = list(found)
        found = _clean(found, "", 0, [])
    except (ValueError, RecursionError):
        return text
    if isinstance(found, str | bool) or found is None or not allows(types, found):
        return text
    return int(found) if isinstance(found, float) and "number" not in types else found


def _explained(problem: ValidationError) -> str:
    """Write a message that names the argument, its value and the expected type."""
    where = "".join(f"{part}: " for part in problem.absolute_path)
    if problem.validator in ("anyOf", "oneOf"):
        branches = [types_of(branch) or {"another type"} for branch in problem.validator_value]
        names = ", ".join(dict.fromkeys(repr(name) for types in branches for name in sorted(types)))
        message = f"{short(problem.instance)} is not of type {names}, or what is in it does not fit"
    elif problem.validator == "type":
        expected = problem.validator_value if isinstance(problem.validator_value, list) else [problem.validator_value]
        message = f"{short(problem.instance)} is not of type {', '.join(map(repr, expected))}"
    elif len(problem.message) > _MESSAGE_CHARACTERS:
        message = f"{short(problem.instance)} does not fit {problem.validator}: {short(problem.validator_value)}"
    else:
        message = problem.message
    return f"{where}{message}"
