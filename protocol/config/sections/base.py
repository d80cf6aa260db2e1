"""The base of all sections: a setting with its reason, shared bounds, and values as TOML."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WILDCARDS = ("0.0.0.0", "::")  # Hosts that stand for all addresses of a machine: for listening, not for connecting.

Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Bytes = Annotated[int, Field(ge=1024, le=2**50)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
InFile = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]  # path/to/file.py:name


def setting(default: Any, *, description: str, why: str, **bounds: Any) -> Any:
    """Declare a setting.

    Args:
        default: Its default, and `why`: the reason for it.
        description: What it does; shown in errors and in docs/settings.md.
        bounds: Bounds as pydantic's `Field` takes them.
    """
    return Field(default, description=description, json_schema_extra={"why": why}, **bounds)


def _checked_host(host: str) -> str:
    """Check that a process could listen on `host`. Raises `ValueError` for a URL, or a host with port."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(%\w+)?", host):
        raise ValueError("must be an address or a host name alone, such as 10.0.0.5; a port has its own setting")
    return host


Host = Annotated[str, AfterValidator(_checked_host)]


class Section(BaseModel):
    """A table of the run file. Unknown keys are errors, and values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def own_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches what listens on `host`."""
    return url_of("127.0.0.1" if host in WILDCARDS else host, port)


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_here(host: str) -> bool:
    """Tell whether a host is an address of this machine, or a name that leads to one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def toml_value(value: object) -> str:
    """Write one value as TOML."""
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
