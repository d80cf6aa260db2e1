"""`docs/settings.md` is what the settings say, and each default has its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate.settings import page
from slipstream.protocol.config import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
FIELDS = {
    f"{section}.{key}": setting
    for section, field in RunConfig.model_fields.items()
    if field.annotation is not None
    for key, setting in field.annotation.model_fields.items()
}


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make it again: python -m docs.generate settings"


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_has_a_meaning_and_its_default_a_reason(name: str) -> None:
    field = FIELDS[name]
    assert field.description
    assert field.is_required() or (field.json_schema_extra or {}).get("why")
