"""A setting that nothing reads does not exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from slipstream.protocol.config import RunConfig

ROOT = Path(__file__).parent.parent
PACKAGES = ("rollout_queue", "rollout_worker", "learner", "weight_sync", "deploy", "slipstream")
CONFIG = ROOT / "protocol" / "config"
SCHEMA = [CONFIG / "schema.py", *(CONFIG / "sections").glob("*.py")]
SETTINGS = [
    f"{section}.{key}"
    for section, field in RunConfig.model_fields.items()
    if field.annotation is not None
    for key in field.annotation.model_fields
]


@cache
def attributes_read() -> set[str]:
    """Every attribute that a process's code reads; of the schema, those that its properties read."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    properties = [
        node
        for file in SCHEMA
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "property" for d in node.decorator_list)
    ]
    return {
        node.attr
        for tree in [*trees, *properties]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_read(setting: str) -> None:
    assert setting.split(".")[1] in attributes_read(), f"nothing reads {setting}: delete it"
