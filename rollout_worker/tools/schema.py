"""Makes the JSON schema of a function for chat templates, and the form of a schema that checks of arguments use.

Transformers makes the schema of a function; pydantic makes it for types that transformers does not know. The function
needs a Google-style docstring with a line for each parameter, because the policy sees no other description. The form
for checks turns transformers' dialect into plain JSON schema.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from typing_extensions import TypedDict

from slipstream.protocol.config import ConfigError

_BASIC = (int, float, str, bool, list, dict, tuple, type(None), Any)

# Whether functions are described without schemas. Set by `leave_out_schemas`.
_left_out = False

_TYPES = "int, float, str, bool, list, dict, Literal, an Enum, a dataclass, a TypedDict or a pydantic model"

# These keywords hold schemas by name; those of `_ONE` hold one schema, those of `_SEVERAL` a list of schemas.
_BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")

_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")

_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")

# These are removed before a check. Some may never end, some ask for a document from elsewhere, and `nullable` is
# OpenAPI's: `checked_form` turns it into a type.
_UNCHECKED = ("pattern", "patternProperties", "uniqueItems", "format", "$dynamicRef", "$schema", "$id", "nullable")

_MAX_HOPS = 16

NAMES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


@dataclass(frozen=True, slots=True)
class Described:
    """Describes a function as a tool.

    Attributes:
        name: The tool's name.
        schema: JSON schema for chat templates.
        converters: Pydantic adapters by parameter, for parameters that need more than the JSON value.
    """

    name: str
    schema: dict[str, Any]
    converters: Mapping[str, TypeAdapter[Any]]


def leave_out_schemas() -> None:
    """Describe functions without their schemas from now on.

    Call this in a process that runs tools which another process has described to the policy. Transformers makes the
    schemas, and its import takes a second.
    """
    global _left_out
    _left_out = True


def described(function: Callable[..., Any]) -> Described:
    """Describe a function, method, partial or callable object as a tool.

    Raises:
        ConfigError: No schema can be made. The text says what to change.
    """
    name = name_of(function)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"Task(tools=...): {function!r:.200} cannot be made into a tool; give a function with type hints"
        )
    if name == "<lambda>":
        raise ConfigError(
            "Task(tools=...): a lambda cannot be described to the policy: it has no name, no type hints and no "
            "docstring; write it as a def"
        )
    try:
        return _described(name, function)
    except (TypeError, ValueError, NameError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"Task(tools=...): {name!r} cannot be made into a tool ({error}); give a function with type hints"
        ) from None


def name_of(function: Any) -> str:
    """Return the name by which the policy calls a function.

    A partial without a name has its function's name; an object without a name has its class's name.
    """
    named = getattr(function, "__name__", None)
    if isinstance(named, str):
        return named
    return name_of(function.func) if isinstance(function, partial) else type(function).__name__


def _described(name: str, function: Callable[..., Any]) -> Described:
    target, bound = _target(function)
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in bound]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            shown = str(parameter.replace(annotation=parameter.empty))
            raise ConfigError(
                f"Task(tools=...): the tool {name!r} has the parameter {shown!r}, which is not given by its name; give "
                f"every parameter a name that it is called by"
            )
    hints = get_type_hints(target, include_extras=True)
    exotic = {each.name for each in parameters if each.name in hints and not _is_plain(hints[each.name])}
    stand_in = _stand_in(name, target, function, parameters, hints, exotic)
    if _left_out:
        return Described(name, _bare(name), {each: _adapter(name, each, hints[each]) for each in exotic})
    schema = _by_transformers(stand_in)
    properties, definitions = schema["function"]["parameters"]["properties"], {}
    converters = {}
    for each in sorted(exotic, key=list(properties).index):
        converters[each] = _adapter(name, each, hints[each])
        made, referred = _by_pydantic(converters[each])
        properties[each] = {**made, **properties[each]}
        definitions.update(referred)
    if definitions:
        schema["function"]["parameters"]["$defs"] = definitions
    return Described(name, schema, converters)


def _bare(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def _by_transformers(function: Callable[..., Any]) -> dict[str, Any]:
    """Make the schema for chat templates with transformers.

    Raises:
        ConfigError: The function lacks type hints or a docstring.
    """
    # Imported here, because a task without tools and a process that leaves out schemas do not need it.
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
        return schema
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"Task(tools=...): the tool {function.__name__!r} cannot be described to the policy: {error}; give every "
            f"parameter a type hint, and the function a Google-style docstring with a line for each under 'Args:'"
        ) from None


def _target(function: Any) -> tuple[Callable[..., Any], set[str]]:
    """Return the function behind a partial or a callable object, and the names that partials have filled in."""
    bound: set[str] = set()
    while isinstance(function, partial):
        bound |= set(function.keywords)
        function = function.func
    if not (inspect.isroutine(function) or hasattr(function, "__wrapped__")):
        function = function.__call__
    return function, bound


def _stand_in(
    name: str,
    target: Callable[..., Any],
    function: Callable[..., Any],
    parameters: list[inspect.Parameter],
    hints: Mapping[str, Any],
    exotic: set[str],
) -> Callable[..., Any]:
    """Make a function for transformers to describe in place of `function`.

    It has the docstring of `function`, and `Any` for the types that transformers does not know (`exotic`).
    """

    def shown() -> None: ...

    kept = {each.name: Any if each.name in exotic else hints[each.name] for each in parameters if each.name in hints}
    if "return" in hints and _is_plain(hints["return"]):
        kept["return"] = hints["return"]
    shown.__name__ = name
    doc = inspect.getdoc(target) or (None if inspect.isroutine(function) else inspect.getdoc(type(function)))
    shown.__doc__ = None if doc is None else _without_types(doc, [each.name for each in parameters])
    shown.__annotations__ = kept
    shown.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            each.replace(kind=each.KEYWORD_ONLY, annotation=kept.get(each.name, inspect.Parameter.empty))
            for each in parameters
        ]
    )
    return shown


def _without_types(doc: str, names: Sequence[str]) -> str:
    """Return a docstring without the types that Google's style allows after a parameter's name, as in `item (str): The
    item.`, since transformers reads names alone."""
    if not names:
        return doc
    before, heading, arguments = doc.partition("Args:\n")
    typed = rf"(?m)^(\s*)({'|'.join(map(re.escape, names))})\s*\((?:[^()\n]|\([^()\n]*\))*\)\s*:"
    return before + heading + re.sub(typed, r"\1\2:", arguments)


def _is_plain(hint: Any) -> bool:
    """Return whether transformers describes a type completely and its values need no conversion from JSON."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is None:
        return hint is None or any(hint is basic for basic in _BASIC)
    if origin is Literal:
        return all(type(part) in (int, float, str, bool, type(None)) for part in parts)
    if origin is dict:
        return parts[0] is str and _is_plain(parts[1])
    if origin is tuple:
        return len(parts) > 1 and all(_is_plain(part) for part in parts)
    return origin in (list, Union, types.UnionType) and all(_is_plain(part) for part in parts)


def _adapter(tool: str, parameter: str, hint: Any) -> TypeAdapter[Any]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(_with_pydantics_dicts(hint))
        adapter.json_schema()
        return adapter
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUserError, RecursionError):
        raise ConfigError(
            f"Task(tools=...): the parameter {parameter!r} of the tool {tool!r} is a {hint!r:.100}, which the policy "
            f"cannot write; take {_TYPES}"
        ) from None


def _with_pydantics_dicts(hint: Any) -> Any:
    """Replace each TypedDict in `hint` by that of `typing_extensions`: before Python 3.12 pydantic takes no other."""
    if is_typeddict(hint):
        fields = get_type_hints(hint, include_extras=True)
        required = hint.__required_keys__
        of_each = {
            name: (Required if name in required else NotRequired)[_with_pydantics_dicts(field)]
            for name, field in fields.items()
        }
        return TypedDict(hint.__name__, of_each)  # type: ignore[operator]
    parts = get_args(hint)
    taken = tuple(_with_pydantics_dicts(part) for part in parts)
    if all(one is other for one, other in zip(taken, parts, strict=True)):
        return hint
    origin = get_origin(hint)
    return Union[taken] if origin is types.UnionType else origin[taken]  # noqa: UP007


def _by_pydantic(adapter: TypeAdapter[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a schema with pydantic, without titles and with references inlined.

    Returns:
        The schema, and by name the definitions that refer to themselves, which cannot be inlined.
    """
    schema = adapter.json_schema()
    definitions = schema.pop("$defs", {})
    kept: dict[str, Any] = {}

    def shown(part: Any, within: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [shown(each, within) for each in part]
        if not isinstance(part, dict):
            return part
        ref = str(part.get("$ref", "")).rpartition("/")[2]
        if ref and ref in definitions:
            if ref in within:
                kept.setdefault(ref, None)
                return {"$ref": f"#/$defs/{ref}"}
            rest = {name: value for name, value in part.items() if name != "$ref"}
            return {**shown(definitions[ref], (*within, ref)), **rest}
        return {
            name: {key: shown(each, within) for key, each in value.items()}
            if name == "properties"
            else value
            if name in ("enum", "const", "default", "required", "examples")
            else shown(value, within)
            for name, value in part.items()
            if not (name == "title" and isinstance(value, str)) and name != "discriminator"
        }

    made = shown(schema, ())
    for name in list(kept):
        kept[name] = shown(definitions[name], (name,))
    return made, kept


def checked_form(schema: Any) -> Any:
    """Return a schema in the form for checks.

    OpenAPI's `nullable`, which transformers writes, becomes the type "null". Keywords that are not checked are removed.
    """
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
    """Return the JSON types that a schema accepts; None if it names none."""
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
    """Return whether a JSON value is of one of `types`. Here 2.0 is an integer, and True is not a number."""
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return True
    return not types.isdisjoint(NAMES.get(type(value), ()))


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow a reference within `root`, through at most `_MAX_HOPS` references; return other schemas unchanged.

    Returns:
        The schema; None if the reference leads nowhere or through too many others.
    """
    for _ in range(_MAX_HOPS):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str) or not ref.startswith("#"):
            return schema
        found: Any = root
        for part in ref.lstrip("#/").split("/") if ref.strip("#/") else []:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return None
