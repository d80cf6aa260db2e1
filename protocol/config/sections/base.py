"""What a section and a setting are, the bounds that settings share, and how a value is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Bytes = Annotated[int, Field(ge=1024, le=2**50)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


def setting(default: Any, *, description: str, why: str, **bounds: Any) -> Any:
    """A setting with a default, and the reason for that."""
    return Field(default, description=description, json_schema_extra={"why": why}, **bounds)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def is_number(value: object, *, above: float, most: float) -> bool:
    """Whether it is a number in `(above, most]`, and no truth value: for settings that take a word or a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value <= most


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def toml_value(value: object) -> str:
    """One value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return str(value)
