"""docs/trained_models.md says what the learner's tests show."""

from __future__ import annotations

from pathlib import Path

from docs.generate.trained_models import page

PAGE = Path(__file__).parents[2] / "docs" / "trained_models.md"


def test_the_page_is_what_the_command_writes() -> None:
    written = "make it anew: python -m docs.generate trained_models"
    assert PAGE.read_text(encoding="utf-8") == page(), written
