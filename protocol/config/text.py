"""Prints run files as TOML with a comment on every setting, and explains their faults in one line each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher, get_close_matches
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slipstream.protocol.config.schema import OTHER_NAMES, RunConfig
from slipstream.protocol.config.sections.algorithm import AlgorithmSection
from slipstream.protocol.config.sections.base import toml_value  # re-exported

MASK = "***"
SECRETS = ("token",)

SECTIONS: dict[str, type[BaseModel]] = {name: get_type_hints(RunConfig)[name] for name in RunConfig.model_fields}

WIDTH = 100
COMMENT_COLUMN = 32

# Meaning of pydantic's error codes for someone who writes TOML; {} are filled from the error's context.
_MEANINGS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number such as 0.5",
    "finite_number": "must be finite",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "names nothing; leave it out for the default",
    "string_pattern_mismatch": "does not have the right form",
    "path_type": "must be a path",
    "list_type": "must be a list, written [first, second]",
    "tuple_type": "must be a list, written [first, second]",
    "missing": "has too few entries",
    "too_long": "has too many entries",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}


def to_toml(
    config: BaseModel, sections: Collection[str] | None = None, to_be_set: Collection[tuple[str, str]] = ()
) -> str:
    """Write the resolved run file as TOML, each setting with its description. A token is printed as `***`.

    `protocol.config.load` reads the whole text back to an equal run file, unless it held a token. Values of the preset
    are comments: otherwise another `learner.algorithm` would change nothing.

    Args:
        sections: Sections to print; None for all.
        to_be_set: (section, key) of settings that have no value yet.
    """
    tables = []
    for section, table in config:
        if sections is not None and section not in sections:
            continue
        lines = [f"[{section}]"]
        presets = table.left_to_preset() if isinstance(table, AlgorithmSection) else ()
        for key, value in table:
            unset, of_preset = (section, key) in to_be_set, key in presets
            # Only one of learner.steps and learner.epochs is given.
            replaced = (section, key) == ("learner", "steps") and table.epochs is not None
            setting = f"# {key} =" if unset or replaced or value is None else f"{key} = {_shown(key, value)}"
            description = str(type(table).model_fields[key].description)
            why = "to be set: " if unset else "the preset's: " if of_preset else ""
            lines += _commented(f"# {setting}" if of_preset else setting, f"{why}{description}")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _commented(setting: str, comment: str) -> list[str]:
    """Write a setting with its comment next to it, or above it if the setting is too long."""
    if len(setting) >= COMMENT_COLUMN:
        return [*("# " + line for line in wrap(comment, WIDTH - 2)), setting]
    beside = wrap(comment, WIDTH - COMMENT_COLUMN - 2)
    return [f"{left:{COMMENT_COLUMN}}# {line}" for left, line in zip_longest([setting], beside, fillvalue="")]


def explain(path: Path, error: ValidationError, overridden: Collection[tuple[str, str]], overrider: str) -> str:
    """Explain each fault in one line: place, value, what is wrong, and what the setting means.

    Args:
        overridden: (section, key) of overridden settings, and `overrider`: where these come from.
    """
    faults = _one_a_setting(error.errors(include_url=False))
    return "\n".join(dict.fromkeys(_explain_one(fault, str(path), overridden, overrider) for fault in faults))


def _one_a_setting(faults: Iterable[ErrorDetails]) -> list[ErrorDetails]:
    """Merge the faults of one setting: pydantic reports one for each type of a union, such as a number or "auto"."""
    found: list[ErrorDetails] = []
    of: dict[tuple[int | str, ...], ErrorDetails] = {}
    for fault in faults:
        place, kind = fault["loc"][:2], fault["loc"][2:3]
        field = find_field(*map(str, place)) if len(place) == 2 else None
        is_union = field is not None and get_origin(field.annotation) in (Union, UnionType)
        kinds = [each for each in get_args(field.annotation) if each is not NoneType] if field and is_union else []
        if len(kinds) < 2 or not kind or isinstance(kind[0], int):
            found.append(fault)
        elif len(fault["loc"]) > 3:
            found.append({**fault, "loc": (*place, *fault["loc"][3:])})
        elif place in of:
            of[place]["msg"] += f", or {_meaning(fault).removeprefix('must be ')}"
        else:
            of[place] = {**fault, "loc": place, "type": "either", "msg": _meaning(fault)}
            found.append(of[place])
    return found


def find_field(section: str, key: str) -> FieldInfo | None:
    """Return the field `section.key` of a run file; None if there is none."""
    return SECTIONS[section].model_fields.get(key) if section in SECTIONS else None


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the word that `word` was most likely meant to be, if any; one with the same parts reordered first."""
    words, parts = list(words), sorted(word.split("_"))
    if reordered := [known for known in words if sorted(known.split("_")) == parts]:
        return reordered[0]
    return next(iter(get_close_matches(word, words, n=1)), None)


def nearest_all(word: str, words: Iterable[str], default: str = "") -> list[str]:
    """Return the words that `word` was most likely meant to be, several if they are equally near.

    If the default begins with `word` (adamw), the default and the words that it begins with.
    """
    word, known = word.lower().replace("-", "_"), list(words)
    if default.startswith(f"{word}_"):
        return [found for found in known if found.startswith(word) and default.startswith(found)]
    near = {found: SequenceMatcher(None, found, word).ratio() for found in get_close_matches(word, known)}
    return [found for found in known if near and near.get(found) == max(near.values())]


def settings() -> list[str]:
    """Return the names of all settings, as section.key."""
    return [f"{section}.{key}" for section, table in SECTIONS.items() for key in table.model_fields]


def named(name: str) -> list[str]:
    """Return the settings that someone may mean by a name, with or without a section, as section.key: hyphens stand in
    it, it is called so by another library, or in another section."""
    name = name.replace("-", "_")
    key = name.rpartition(".")[2]
    if name in settings():
        return [name]
    if meant := OTHER_NAMES.get(name) or OTHER_NAMES.get(key):
        return [meant]
    return [setting for setting in settings() if setting.endswith(f".{key}")]


def _explain_one(fault: ErrorDetails, path: str, overridden: Collection[tuple[str, str]], overrider: str) -> str:
    kind = fault["type"]
    section, key, *inner = [*map(str, fault["loc"]), "", ""][: max(2, len(fault["loc"]))]
    by_override = (section, key) in overridden if key else any(section == given for given, _ in overridden)
    source = overrider if by_override else path
    name = f"{section}.{key}" + "".join(f"[{index}]" for index in inner)
    field, table = find_field(section, key), SECTIONS.get(section)
    if not section or (not key and kind == "value_error"):
        meaning = _meaning(fault)
        return f"{overrider if _names_any(meaning, overridden, section) else path}: {meaning}"
    if table is None:
        meant = nearest(section, SECTIONS)
        hint = f"did you mean [{meant}]?" if meant else f"the sections are: {', '.join(SECTIONS)}"
        return f"{source}: [{section}] is not a section; {hint}"
    if not key and kind == "missing":
        needed = [f"{name} = {info.description}" for name, info in table.model_fields.items() if info.is_required()]
        return f"{source}: the section [{section}] is missing; it needs {', '.join(needed)}"
    if not key:
        return f"{source}: {section} = {_shown('', fault['input'])}: must be a table, written [{section}]"
    if field is None:
        elsewhere = " or ".join(named(f"{section}.{key}"))
        close = nearest(key, table.model_fields)
        meant = elsewhere or (close and f"{section}.{close}")
        hint = f"did you mean {meant}?" if meant else f"[{section}] has: {', '.join(table.model_fields)}"
        return f"{source}: {section}.{key} is not a setting; {hint}"
    if kind == "missing" and not inner:
        return f"{source}: {name} is missing ({field.description})"
    meant = _meant(fault, field)
    return f"{source}: {name} = {_shown(key, fault['input'])}: {_meaning(fault)}{meant} ({field.description})"


def _meant(fault: ErrorDetails, field: FieldInfo) -> str:
    """Suggest values that a misspelt one is near to."""
    if fault["type"] != "literal_error" or not isinstance(fault["input"], str):
        return ""
    values = [value for value in get_args(field.annotation) if isinstance(value, str)]
    close = nearest_all(fault["input"], values, field.default if isinstance(field.default, str) else "")
    return f"; did you mean {' or '.join(map(toml_value, close))}?" if close else ""


def _names_any(meaning: str, settings: Collection[tuple[str, str]], section: str) -> bool:
    """Tell whether a text blames one of the settings: it names it before the colon, since the remedy follows.

    Settings of `section` may be named without it.
    """
    what = meaning.partition(": ")[0]
    names = [rf"{of}\.{key}" if of != section else rf"({of}\.)?{key}" for of, key in settings]
    return any(re.search(rf"(?<![\w.]){name}\b", what) for name in names)


def _meaning(fault: ErrorDetails) -> str:
    meaning = _MEANINGS.get(fault["type"])
    if meaning is None:
        return fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return meaning.format_map(fault.get("ctx", {}))


def _shown(key: str, value: Any) -> str:
    if key == "store" and isinstance(value, str):
        # It may be what is refused, and so hold a password still.
        value = re.sub("(?<=password=)[^&]*", MASK, re.sub("(://[^:@/]*:).*@", rf"\g<1>{MASK}@", value))
    return toml_value(MASK if key in SECRETS else value)
