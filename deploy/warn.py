"""A warning before the start."""

from __future__ import annotations

import sys


def warn(text: str) -> None:
    """On stderr, for who starts the run."""
    print(f"slipstream: warning: {text}", file=sys.stderr, flush=True)
