"""The plans in `docs/sizing.md` are those that the code makes."""

from __future__ import annotations

from docs.generate.sizing import PAGE, page


def test_the_plans_are_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make it again: python -m docs.generate sizing"
