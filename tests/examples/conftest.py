"""The modules of one example at a time, as its own scripts import them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

Load = Callable[[str], ModuleType]


@contextmanager
def modules_of(name: str) -> Iterator[Load]:
    """Imports modules of an example. Examples name theirs alike (`task`, `demonstrations`), so these are forgotten
    afterwards, and so is that of another test that imported the task."""
    folder = EXAMPLES / name
    places, ours = [str(folder), str(EXAMPLES)], {path.stem for path in folder.glob("*.py")}
    before, path = {module: sys.modules.pop(module, None) for module in ours}, sys.path.copy()
    sys.path[:0] = places
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = path
        for module, old in before.items():
            sys.modules.pop(module, None)
            if old is not None:
                sys.modules[module] = old


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    """Load the example that the test module's `NAME` names."""
    with modules_of(request.module.NAME) as load:
        yield load
