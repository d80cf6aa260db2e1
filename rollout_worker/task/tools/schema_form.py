"""JSON schemas of parameters as they are checked: transformers' dialect made plain, and what a check reads of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keywords by what they hold: schemas by name, one schema, a list of schemas.
_BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")

# A check of these may take for ever, or asks for a document from elsewhere.
_UNCHECKED = ("pattern", "patternProperties", "uniqueItems", "format", "$dynamicRef", "$schema", "$id", "nullable")
_MOST_HOPS = 16

NAMES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def checked_form(schema: Any) -> Any:
    """`schema` with OpenAPI's `nullable`, which transformers writes, as a type of its own, and without what is not
    checked."""
    if not isinstance(schema, dict):
        return schema
    form = {name: value for name, value in schema.items() if name not in _UNCHECKED}
    if "patternProperties" in schema:
        form.pop("additionalProperties", None)
    for name in form.keys() & {*_BY_NAME}:
        if isinstance(form[name], dict):
            form[name] = {key: checked_form(value) for key, value in form[name].items()}
    for name in form.keys() & {*_ONE}:
        form[name] = checked_form(form[name])
    for name in form.keys() & {*_SEVERAL}:
        if isinstance(form[name], list):
            form[name] = [checked_form(part) for part in form[name]]
    return _or_null(form) if schema.get("nullable") is True else form


def _or_null(form: dict[str, Any]) -> dict[str, Any]:
    kinds = form.get("type")
    if isinstance(kinds, str):
        form["type"] = [kinds, "null"]
    elif isinstance(kinds, list):
        form["type"] = [*kinds, *([] if "null" in kinds else ["null"])]
    if "enum" in form and None not in form["enum"]:
        form["enum"] = [*form["enum"], None]
    if "anyOf" in form:
        form["anyOf"] = [*form["anyOf"], {"type": "null"}]
    return form


def types_of(schema: Any) -> set[str] | None:
    """The JSON types that a schema takes; None if it names none."""
    if not isinstance(schema, dict):
        return None
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return set(kinds)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not values:
        return None
    return {name for value in values for name in NAMES.get(type(value), ())}


def allows(types: set[str], value: Any) -> bool:
    """Whether a JSON value is of one of `types`; 2.0 is an integer, True is no number."""
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return True
    return not types.isdisjoint(NAMES.get(type(value), ()))


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a reference within `root` refers to; anything else as it is."""
    for _ in range(_MOST_HOPS):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str) or not ref.startswith("#"):
            return schema
        found: Any = root
        for part in ref.lstrip("#/").split("/") if ref.strip("#/") else []:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return None
