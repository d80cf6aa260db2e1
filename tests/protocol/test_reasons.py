"""Reason codes stand in `slipstream.protocol.reasons` and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from slipstream.protocol import reasons

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "rollout_queue", "rollout_worker", "learner", "weight_sync", "deploy", "slipstream")
CODES = {name: value for name, value in vars(reasons).items() if name.isupper()}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if file != ROOT / "protocol" / "reasons.py":
                yield file, ast.parse(file.read_text(encoding="utf-8"))


def test_no_code_stands_for_two_reasons() -> None:
    assert len(set(CODES.values())) == len(CODES)


def test_every_code_is_used() -> None:
    used = {
        node.attr
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "reasons"
    }
    assert not CODES.keys() - used


def test_no_code_is_spelt_again() -> None:
    """Codes of one word are too common to tell from other strings ("server", "row")."""
    telling = {code for code in CODES.values() if "_" in code}
    # A column, a setting's value or a struct's field may be called the same.
    names = {"finish_reason", "group_size", "schema_version", "zero_variance"}
    again = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in telling - names
    ]
    assert again == []
