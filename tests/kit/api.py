"""Checks answers against the types of a client's package, which the client itself does not check."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter


def conforms(kind: Any, value: Any) -> None:
    """Check that `value`, decoded from JSON, is of this type of a client's package, and has no fields besides.

    Raises:
        ValidationError: If a field is missing, or of another type.
        AssertionError: If there is a field that the type does not have.
    """
    _check_fields(TypeAdapter(kind).validate_python(value), "")


def _check_fields(value: Any, where: str) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{where} {type(value).__name__} has no {sorted(value.model_extra or {})}"
        for name in value.model_fields_set:
            _check_fields(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _check_fields(each, f"{where}[{number}]")
