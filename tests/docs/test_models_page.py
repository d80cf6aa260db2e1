"""docs/models.md says what the start check finds."""

from __future__ import annotations

from pathlib import Path

from docs.generate.models import page

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make it again: python -m docs.generate models"
