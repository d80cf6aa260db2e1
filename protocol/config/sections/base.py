"""What a section and a setting are, and the bounds that settings share."""

from __future__ import annotations

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


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
