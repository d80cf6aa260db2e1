"""The files of the page that the queue serves at `/` and that a report holds. They need no build step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

INDEX = "index.html"

# The charts' library, as the Python package `plotly` brings it, with its licence at its head.
CHARTS = "plotly.js"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}


@cache
def files() -> Mapping[str, bytes]:
    """Return the page's files by name."""
    folder = resources.files(__name__)
    found = {
        file.name: file.read_bytes()
        for file in (*folder.iterdir(), *(folder / "scripts").iterdir())
        if file.is_file() and f".{file.name.rpartition('.')[2]}" in TYPES
    }
    found[CHARTS] = (resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return found
