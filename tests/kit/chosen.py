"""Chooses the model families for the short tests: others with each commit, the same ones on every machine."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@cache
def commit() -> str:
    """Return the hash of the checkout's commit, or "none" outside of a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def chosen_families(families: Set[str], count: int) -> set[str]:
    """Choose `count` of the families by a hash of the commit and the family."""
    return set(sorted(families, key=lambda family: hashlib.sha256(f"{commit()} {family}".encode()).digest())[:count])


def family_of(parameter: Any) -> str:
    """Return the family of a test's parameter: a chat template, a case, or the name of one ("qwen3, thinking on")."""
    if isinstance(parameter, str):
        return parameter.partition(",")[0]
    return str(getattr(parameter, "stem", None) or parameter.how)
