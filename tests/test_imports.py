"""The import rule of DESIGN.md, and I8 (nothing on the wire is pickled), read off the source of each package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "protocol": set[str](),
    "rollout_queue": {"protocol"},
    "rollout_worker": {"protocol"},
    "weight_sync": {"protocol"},
    "learner": {"protocol", "weight_sync"},
    "deploy": {"protocol", "rollout_queue", "rollout_worker", "weight_sync", "learner"},
    "slipstream": {"protocol", "rollout_worker", "deploy"},
}
TORCH_FREE = ("protocol", "rollout_queue", "rollout_worker", "slipstream")
PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
# The object collectives of torch.distributed and accelerate pickle.
PICKLING_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


class Use(NamedTuple):
    """A place in the source and the module or call that it uses."""

    place: str
    what: str


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} holds no Python file"
    return files


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(tree: ast.Module, file: Path) -> Iterator[Use]:
    """Every import at any depth, in a function or under TYPE_CHECKING too, and every `import_module("...")`."""
    for node in ast.walk(tree):
        place = f"{file.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Use(place, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Use(place, node.module or "")
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
            module = node.args[0]
            if isinstance(module, ast.Constant) and isinstance(module.value, str):
                yield Use(place, module.value)


def called(node: ast.Call) -> str:
    """The last name of what is called: `load` of `torch.load(...)`."""
    function = node.func
    return getattr(function, "attr", getattr(function, "id", ""))


def forbidden_imports(tree: ast.Module, file: Path, package: str) -> list[Use]:
    allowed = MAY_IMPORT[package] | {package}
    forbidden = set(MAY_IMPORT) - allowed | ({"torch"} if package in TORCH_FREE else set())
    return [use for use in imports(tree, file) if use.what.split(".")[0] in forbidden]


def pickling(tree: ast.Module, file: Path) -> Iterator[Use]:
    """Imports of picklers, and calls that pickle unless an argument forbids it."""
    yield from (use for use in imports(tree, file) if use.what.split(".")[0] in PICKLERS)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        torch_load = called(node) == "load" and ast.unparse(node.func) == "torch.load"
        if (
            called(node) in PICKLING_CALLS
            or given.get("allow_pickle", False) is not False
            or (torch_load and given.get("weights_only") is not True)
        ):
            yield Use(f"{file.name}:{node.lineno}", ast.unparse(node.func))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_the_design_allows(package: str) -> None:
    assert [use for file in sources(package) for use in forbidden_imports(tree_of(file), file, package)] == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_i8_nothing_is_pickled(package: str) -> None:
    assert [use for file in sources(package) for use in pickling(tree_of(file), file)] == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("protocol", "import torch"),
        ("protocol", "from rollout_queue.ledger.validation import check"),
        ("rollout_queue", "def f():\n    from torch import nn"),
        ("rollout_queue", "if TYPE_CHECKING:\n    import rollout_worker.task.task"),
        ("rollout_worker", "import importlib\nimportlib.import_module('torch.nn')"),
        ("weight_sync", "import learner"),
        ("learner", "import rollout_queue.ledger.ledger as ledger"),
    ],
)
def test_the_import_rule_finds_what_it_forbids(package: str, source: str) -> None:
    assert len(forbidden_imports(ast.parse(source), Path("file.py"), package)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from cloudpickle import dumps",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "dist.broadcast_object_list(objects)",
    ],
)
def test_the_pickling_rule_finds_what_it_forbids(source: str) -> None:
    assert len(list(pickling(ast.parse(source), Path("file.py")))) == 1


def test_the_pickling_rule_lets_safe_loads_pass() -> None:
    source = "torch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)\njson.load(file)"
    assert list(pickling(ast.parse(source), Path("file.py"))) == []


@pytest.mark.parametrize("module", ["protocol.config", "protocol.client", "rollout_queue.service", "slipstream"])
def test_a_process_that_needs_no_torch_loads_none(module: str) -> None:
    """In a fresh interpreter: neither the module nor anything that it imports loads torch."""
    code = f"import sys, {module}; sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# What a learner imports for each transport, with vLLM not to be found.
WITHOUT_VLLM = """
import sys
from importlib import import_module

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from protocol.config import WeightSyncSection
from weight_sync.transports.base import build_transport
from weight_sync.transports.registry import TRANSPORTS
import weight_sync.publisher
for name in ("auto", *TRANSPORTS):
    build_transport(WeightSyncSection(transport=name))
assert "vllm" not in sys.modules
"""


def test_a_learner_needs_no_vllm_beside_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_VLLM], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_vllm_is_imported_by_its_own_end_alone() -> None:
    """`weight_sync.vllm` runs inside vLLM's processes."""
    found = [
        (file.relative_to(ROOT), use)
        for package in MAY_IMPORT
        for file in sources(package)
        for use in imports(tree_of(file), file)
        if use.what.split(".")[0] == "vllm"
    ]
    inside = {(file, use) for file, use in found if "vllm" in file.parts}
    assert [one for one in found if one not in inside] == []
