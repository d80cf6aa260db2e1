"""Writes docs/settings.md from the descriptions, bounds, defaults and reasons of the run file's settings."""

from __future__ import annotations

import re
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slipstream.protocol.config import RunConfig
from slipstream.protocol.config.sections.base import toml_value

INTRODUCTION = """# Settings

Every setting of a run file, generated from `protocol/config/sections/` by `python -m docs.generate settings`. Each can
be given on the command line as `--section.key value`. `slipstream config run.toml` checks a run file and prints it
whole.
"""

_SIGNS = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}


def page() -> str:
    """Returns the text of the page."""
    parts = [INTRODUCTION]
    for section, field in RunConfig.model_fields.items():
        table = field.annotation
        assert isinstance(table, type)
        assert issubclass(table, BaseModel)
        rows = [_row(key, setting) for key, setting in table.model_fields.items()]
        parts.append(
            "\n".join(
                [f"## `[{section}]`", "", "| setting | default | meaning | why |", "|---|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(parts)


def _row(key: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    why = str(extra.get("why", "")) if isinstance(extra, dict) else ""
    bounds = _setting_bounds(field)
    meaning = f"{field.description}{f' ({bounds})' if bounds else ''}"
    cells = (f"`{key}`", _default(field), meaning, why)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "to be set"
    return "none" if field.default is None else f"`{toml_value(field.default)}`"


def _setting_bounds(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(toml_value(value) for value in get_args(field.annotation))
    found = []
    for bound in field.metadata:
        for kind, (sign, name) in _SIGNS.items():
            if isinstance(bound, kind):
                found.append(f"{sign} {_number(getattr(bound, name))}")
    return ", ".join(found)


def _number(value: float) -> str:
    """Powers of two and ten as such, where they are long."""
    if isinstance(value, int) and value >= 1024 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return re.sub(r"^1(,000){2,}$", lambda match: f"10^{3 * match[0].count(',')}", text)
