"""Finds out what a chat format shows of tools' parameters, and writes their schemas so that it shows all.

Formats write schemas in languages of their own and leave out what these have no words for: values that are numbers, the
type of what may be null, the fields of an object in a list. So each kind of parameter is tried with names and values
that no format contains, and with other types. One that is not shown whole is written without references and without
unions with null, and if that does not help, as JSON in its description.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Renders a conversation with tools. None where the format refuses them.
RenderTools = Callable[[Sequence[dict[str, Any]]], str | None]

# Maximum schemas that one parameter may become where references are inlined, and maximum types of one that are tried.
_MAX_PARTS, _MAX_TYPES = 2000, 12

_TOOL, _PARAMETER = "slipstream7f3atool", "slipstream7f3aparameter"

_SAMPLE = {"type": "object", "properties": {_PARAMETER: {"type": "array", "items": {"type": ["string", "null"]}}}}

# Ways of writing JSON.
_JSON: tuple[dict[str, Any], ...] = ({}, {"separators": (",", ":")}, {"sort_keys": True}, {"indent": 2}, {"indent": 4})

# These keywords hold schemas by name, one schema, and a list of schemas.
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")

# Some formats take a parameter of such a name for a keyword, and leave it out.
_KEYWORDS = frozenset(
    ["type", "description", "properties", "required", "nullable", "enum", "items", "default", "title"]
)

_UNIONS = ("anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")


def shown_tools(tools: Sequence[dict[str, Any]], render: RenderTools) -> list[dict[str, Any]]:
    """Write tools so that a format shows their parameters.

    Args:
        tools: JSON schemas of the tools. They are not changed.
        render: Renders a conversation with given tools.

    Returns:
        The tools, with other schemas for the parameters that are not shown whole. A format that writes schemas as JSON
        gets them as they are, and so does one that shows no tools.
    """
    text = render([_tool(_SAMPLE)])
    if text is None or _PARAMETER not in text or any(json.dumps(_SAMPLE, **way) in text for way in _JSON):
        return list(tools)
    trial = _Trial(render)
    return [{**tool, "function": _written(tool["function"], trial)} for tool in tools]


def nested_words(parameters: Any) -> Iterator[str]:
    """Yield the words of the names and values in a tool's parameters, at any depth, which a prompt must contain."""
    if isinstance(parameters, list):
        for part in parameters:
            yield from nested_words(part)
    if not isinstance(parameters, dict):
        return
    for name, value in parameters.items():
        if name in _BY_NAME and isinstance(value, dict):
            yield from itertools.chain(*map(_ascii, value if name == "properties" else ()))
            yield from nested_words(list(value.values()))
        elif name in _ONE or name in _SEVERAL:
            yield from nested_words(value)
        elif name in ("enum", "const"):
            for each in value if name == "enum" and isinstance(value, list) else [value]:
                if isinstance(each, str | int) and not isinstance(each, bool):
                    yield from _ascii(str(each))


def _ascii(text: str) -> list[str]:
    """Return the parts of a text that are the same however a format quotes it."""
    return re.findall("[a-zA-Z0-9]+", text)


def plain(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema without references and unions with null. A reference to itself stays.

    Args:
        schema: The schema.
        root: The schema that references lead into.
    """
    count = 0

    def written(part: Any, within: tuple[str, ...]) -> Any:
        nonlocal count
        count += 1
        if count > _MAX_PARTS:
            raise OverflowError
        if not isinstance(part, dict):
            return part
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in within and isinstance(found := _resolved(ref, root), dict):
            beside = {name: value for name, value in part.items() if name != "$ref"}
            return written({**found, **beside}, (*within, ref))
        made = _parts(part, lambda each: written(each, within))
        return _without_null(made)

    try:
        return written(schema, ())
    except OverflowError:
        return schema


def _written(function: dict[str, Any], trial: _Trial) -> dict[str, Any]:
    """Return a function whose parameters are shown."""
    parameters = function.get("parameters")
    if not isinstance(parameters, dict) or not isinstance(properties := parameters.get("properties"), dict):
        return function
    found, told = {}, ""
    for name, schema in properties.items():
        found[name] = schema
        tried = name if name in _KEYWORDS else _PARAMETER
        if not isinstance(schema, dict) or trial.shows(schema, parameters, tried):
            continue
        found[name] = short = plain(schema, parameters)
        if trial.shows(short, parameters, tried):
            continue
        whole = _with_definitions(short, parameters)
        described = str(short.get("description", ""))
        if trial.shows({"type": "string", "description": ""}, {}, tried):
            bare = {key: value for key, value in whole.items() if key != "description"}
            found[name] = {**short, "description": f"{described} JSON schema: {_json(bare)}".strip()}
        else:
            told += f"\nJSON schema of {name}: {_json(whole)}"
    if all(found[name] is schema for name, schema in properties.items()):
        return function
    return {
        **function,
        "description": function.get("description", "") + told,
        "parameters": {**parameters, "properties": found},
    }


@dataclass(slots=True)
class _Words:
    """Replaces names and values by words that no format contains, and collects the words."""

    words: list[str] = field(default_factory=list)

    def replaced(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        made = _parts(schema, self.replaced)
        if isinstance(named := made.get("properties"), dict):
            names = {name: self._word() for name in named}
            made["properties"] = {names[name]: part for name, part in named.items()}
            if isinstance(required := made.get("required"), list):
                made["required"] = [names.get(name, name) for name in required]
        if isinstance(values := made.get("enum"), list):
            made["enum"] = [self._value(value) for value in values]
        if "const" in made:
            made["const"] = self._value(made["const"])
        if isinstance(made.get("description"), str):
            made["description"] = self._word()
        return made

    def _value(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return value
        if isinstance(value, str):
            return self._word()
        number = 7_310_000 + len(self.words) + (0.5 if isinstance(value, float) else 0)
        self.words.append(str(number))
        return number

    def _word(self) -> str:
        self.words.append(f"slip{len(self.words):03d}7f3a")
        return self.words[-1]


class _Trial:
    """Tries what a format shows, each kind of parameter once."""

    def __init__(self, render: RenderTools) -> None:
        self._render = render
        self._known: dict[str, bool] = {}

    def shows(self, schema: Mapping[str, Any], root: Mapping[str, Any], name: str = _PARAMETER) -> bool:
        """Return whether the format shows the names, values and types of a parameter, and its description.

        Args:
            schema: The parameter's schema.
            root: The schema that references lead into.
            name: The parameter's name, if the format may take it for a keyword.
        """
        words = _Words()
        tried = words.replaced(dict(schema))
        definitions = {name: words.replaced(part) for name, part in _reached(schema, root).items()}
        key = json.dumps([name, tried, definitions], default=str)
        if key not in self._known:
            text = self._text(tried, definitions, name)
            found = text is not None and all(word in text for word in (name, *words.words))
            self._known[key] = found and self._shows_types(tried, definitions, text, name)
        return self._known[key]

    def _shows_types(self, tried: dict[str, Any], definitions: dict[str, Any], text: str | None, name: str) -> bool:
        """Return whether the text changes where one type becomes another, for each type that no value shows."""
        whole = {"parameter": tried, "definitions": definitions}
        for place in list(_types(whole))[:_MAX_TYPES]:
            other = json.loads(json.dumps(whole, default=str))
            part = other
            for key in place:
                part = part[key]
            part["type"] = _other_type(part["type"])
            if self._text(other["parameter"], other["definitions"], name) == text:
                return False
        return True

    def _text(self, schema: dict[str, Any], definitions: dict[str, Any], name: str) -> str | None:
        held: dict[str, dict[str, Any]] = {ref.rpartition("/")[0].strip("#/"): {} for ref in definitions}
        for ref, part in definitions.items():
            where, _, last = ref.rpartition("/")
            held[where.strip("#/")][last] = part
        parameters = {"type": "object", "properties": {name: schema}, "required": [name], **held}
        return self._render([_tool(parameters)])


def _tool(parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": _TOOL, "description": "Looks it up.", "parameters": parameters}
    return {"type": "function", "function": function}


def _parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with each schema in it changed."""
    made = dict(schema)
    for name in made.keys() & {*_BY_NAME}:
        if isinstance(made[name], dict):
            made[name] = {key: change(part) for key, part in made[name].items()}
    for name in made.keys() & {*_ONE}:
        made[name] = change(made[name])
    for name in made.keys() & {*_SEVERAL}:
        if isinstance(made[name], list):
            made[name] = [change(part) for part in made[name]]
    return made


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of a union with null as that of the other part, with OpenAPI's `nullable`."""
    for union in _UNIONS:
        parts = schema.get(union)
        if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
            others = [part for part in parts if part.get("type") != "null"]
            if len(others) < len(parts) and others:
                rest = {name: value for name, value in schema.items() if name != union}
                return {**(others[0] if len(others) == 1 else {union: others}), **rest, "nullable": True}
    kinds = schema.get("type")
    if isinstance(kinds, list) and "null" in kinds and len(kinds) == 2:
        return {**schema, "type": next(kind for kind in kinds if kind != "null"), "nullable": True}
    return schema


def _resolved(ref: str, root: Mapping[str, Any]) -> Any:
    where, _, name = ref.rpartition("/")
    known = root.get(where.removeprefix("#/"))
    is_here = where.removeprefix("#/") in _DEFINITIONS and isinstance(known, dict)
    return known.get(name) if is_here and isinstance(known, dict) else None


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)
    elif isinstance(schema, dict):
        if isinstance(ref := schema.get("$ref"), str):
            yield ref
        yield from _references(list(schema.values()))


def _reached(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that a schema refers to, directly or through others, by reference."""
    found: dict[str, Any] = {}
    waiting = [*_references(schema)]
    while waiting:
        ref = waiting.pop()
        if ref not in found and (part := _resolved(ref, root)) is not None:
            found[ref] = part
            waiting += _references(part)
    return found


def _with_definitions(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the definitions that it refers to."""
    definitions = {ref.rpartition("/")[2]: part for ref, part in _reached(schema, root).items()}
    return {**schema, "$defs": definitions} if definitions else schema


def _json(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _types(schema: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of the schemas whose type shows in nothing else."""
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from _types(part, (*place, number))
    elif isinstance(schema, dict):
        kinds = schema.get("type")
        is_told = not schema.keys().isdisjoint(("enum", "const", "properties", "items", "prefixItems"))
        if isinstance(kinds, str | list) and kinds not in ("null", []) and not is_told:
            yield place
        for name, part in schema.items():
            if name not in ("required", "enum", "default", "examples"):
                yield from _types(part, (*place, name))


def _other_type(kinds: Any) -> Any:
    """Return another type in place of the first that is not null."""
    if isinstance(kinds, list):
        first = next((kind for kind in kinds if kind != "null"), "null")
        return [_other_type(kind) if kind == first else kind for kind in kinds]
    return "boolean" if kinds == "string" else "string"
