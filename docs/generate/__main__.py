"""`python -m docs.generate [PAGE ...]` writes docs/PAGE.md for each page that is named, for all of them by default."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

DOCS = Path(__file__).parents[1]

# Each is a module next to this one with a function `page`.
PAGES = ("settings", "algorithms", "from_trl", "models", "sizing", "measured_on_gpus")


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in PAGES]:
        sys.exit(f"{unknown[0]}: there is no such page; the pages are: {', '.join(PAGES)}")
    for name in names or PAGES:
        text = import_module(f"docs.generate.{name}").page()
        (DOCS / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
