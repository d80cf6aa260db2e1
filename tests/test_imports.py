"""Checks what each package and each folder imports, and that nothing is pickled (I8), from the source alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
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
    # `__init__` alone names learner and weight_sync, and imports them at first use.
    "slipstream": {"protocol", "rollout_worker", "weight_sync", "learner", "deploy"},
}
# Packages of the root that are imported as `slipstream.NAME`, by a link in slipstream/.
LINKED = MAY_IMPORT.keys() - {"slipstream"}
# Within a package: what a folder may import besides itself. Folders stand in the order of a package's layers, so that
# none imports one that stands before it. Functions and `TYPE_CHECKING` count like the top of a file.
FOLDERS = {
    "protocol": set[str](),
    "protocol/config/sections": {"protocol"},
    "protocol/config": {"protocol", "protocol/config/sections"},
    "rollout_queue/page": set(),
    "rollout_queue/ledger": set(),
    "rollout_queue/store": {"rollout_queue/ledger"},
    "rollout_queue/observe": {"rollout_queue/ledger"},
    "rollout_queue/broker": {"rollout_queue/ledger", "rollout_queue/observe", "rollout_queue/store"},
    "rollout_queue/api": {
        *("rollout_queue/broker", "rollout_queue/ledger", "rollout_queue/observe", "rollout_queue/store"),
        "rollout_queue/page",
    },
    "rollout_queue": {"rollout_queue/api", "rollout_queue/broker", "rollout_queue/store"},
    "rollout_worker/user_code": set(),
    "rollout_worker/chat/parsers": set(),
    "rollout_worker/vision": {"rollout_worker/chat/parsers"},
    "rollout_worker/chat": {"rollout_worker/chat/parsers", "rollout_worker/user_code", "rollout_worker/vision"},
    "rollout_worker/tools": {"rollout_worker/chat/parsers", "rollout_worker/user_code", "rollout_worker/vision"},
    "rollout_worker/data": set(),
    "rollout_worker/task": {
        *("rollout_worker/data", "rollout_worker/tools", "rollout_worker/chat", "rollout_worker/chat/parsers"),
        *("rollout_worker/user_code", "rollout_worker/vision"),
    },
    "rollout_worker/inference": {"rollout_worker/user_code", "rollout_worker/vision"},
    "rollout_worker/episodes": {
        *("rollout_worker/inference", "rollout_worker/task", "rollout_worker/data", "rollout_worker/tools"),
        *("rollout_worker/chat", "rollout_worker/chat/parsers", "rollout_worker/user_code", "rollout_worker/vision"),
    },
    "rollout_worker/agent/api": {
        *("rollout_worker/tools", "rollout_worker/chat/parsers", "rollout_worker/user_code", "rollout_worker/vision"),
    },
    "rollout_worker/agent": {
        "rollout_worker/agent/api",
        *("rollout_worker/episodes", "rollout_worker/inference", "rollout_worker/task", "rollout_worker/data"),
        *("rollout_worker/tools", "rollout_worker/chat", "rollout_worker/chat/parsers", "rollout_worker/user_code"),
    },
    "rollout_worker": {
        *("rollout_worker/agent", "rollout_worker/episodes", "rollout_worker/inference", "rollout_worker/task"),
        *("rollout_worker/data", "rollout_worker/tools", "rollout_worker/chat", "rollout_worker/chat/parsers"),
        *("rollout_worker/user_code", "rollout_worker/vision"),
    },
    "weight_sync/weights": set(),
    "weight_sync/server": {"weight_sync/weights"},
    "weight_sync/transports": {"weight_sync/server", "weight_sync/weights"},
    "weight_sync/transports/gloo": {"weight_sync/transports", "weight_sync/server", "weight_sync/weights"},
    "weight_sync/transports/http": {"weight_sync/transports", "weight_sync/server", "weight_sync/weights"},
    "weight_sync/transports/gpu": {"weight_sync/transports", "weight_sync/server", "weight_sync/weights"},
    "weight_sync/fleet": {"weight_sync/transports", "weight_sync/server", "weight_sync/weights"},
    "weight_sync/vllm/engine": {
        *("weight_sync/transports", "weight_sync/transports/gloo", "weight_sync/transports/http"),
        *("weight_sync/transports/gpu", "weight_sync/weights"),
    },
    # A server passes on the chunks that it staged, so its routes share the wire of the http transport.
    "weight_sync/vllm": {
        *("weight_sync/vllm/engine", "weight_sync/server", "weight_sync/transports", "weight_sync/transports/http"),
    },
    "weight_sync/ranks": {"weight_sync/transports", "weight_sync/weights"},
    "weight_sync": {"weight_sync/fleet", "weight_sync/ranks", "weight_sync/transports", "weight_sync/weights"},
    "learner/algorithm": set(),
    "learner/ranks": set(),
    "learner/feed": {"learner/algorithm"},
    "learner/attention": {"learner/feed"},
    "learner/model": {"learner/attention", "learner/feed", "learner/ranks", "learner/algorithm"},
    "learner/training": {"learner/model", "learner/feed", "learner/ranks", "learner/algorithm"},
    "learner/report": {"learner/training", "learner/feed", "learner/algorithm"},
    "learner/checkpoints": {"learner/report", "learner/training", "learner/model", "learner/ranks"},
    "learner": {
        *("learner/checkpoints", "learner/report", "learner/training", "learner/model", "learner/attention"),
        *("learner/feed", "learner/ranks", "learner/algorithm"),
    },
    "deploy/servers": set(),
    "deploy/run": {"deploy/servers"},
    "deploy/checks": {"deploy/run", "deploy/servers"},
    "deploy/planning": set(),
    "deploy/clusters": {"deploy/run", "deploy/servers"},
    "deploy/commands": {"deploy/clusters", "deploy/planning", "deploy/checks", "deploy/run", "deploy/servers"},
    "deploy": {
        *("deploy/commands", "deploy/clusters", "deploy/planning", "deploy/checks"),
        "deploy/run",
        "deploy/servers",
    },
    "slipstream": set(),
    "slipstream/environments": {"slipstream"},
    "slipstream/sandboxes": {"slipstream", "slipstream/environments"},
    "slipstream/trl": {"slipstream"},
    "slipstream/trl/experimental": set(),
    "slipstream/trl/experimental/async_grpo": {"slipstream/trl"},
    "slipstream/trl/experimental/openenv": set(),
}
# Imports that the table does not allow yet, and what will end each: a change of the house (a to f), or a cut.
NOT_YET: dict[tuple[str, str], str] = {}
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


@cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imports(tree: ast.Module, file: Path) -> Iterator[Use]:
    """Every import at any depth, in a function or under TYPE_CHECKING too, and every `import_module("...")`.

    Modules are named by their place: `learner.loop` for `slipstream.learner.loop`.
    """
    for node in walk(tree):
        yield from (Use(place, name_of_folder(what)) for place, what in imported_names(node, file))


def imported_names(node: ast.AST, file: Path) -> Iterator[Use]:
    """What a node imports, by the names that stand there."""
    place = f"{file.name}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.Import):
        yield from (Use(place, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        names = [f"slipstream.{alias.name}" for alias in node.names] if node.module == "slipstream" else [node.module]
        yield from (Use(place, name) for name in names)
    elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
        module = node.args[0]
        if isinstance(module, ast.Constant) and isinstance(module.value, str):
            yield Use(place, module.value)


def name_of_folder(module: str) -> str:
    """Return `learner.loop` for the module `slipstream.learner.loop`: this file names modules by their place."""
    under = module.removeprefix("slipstream.")
    return under if under.split(".")[0] in LINKED else module


@cache
def files_by_module() -> dict[str, Path]:
    """Every file of the packages, by the name that it is imported by."""
    found = {}
    for package in MAY_IMPORT:
        for file in sources(package):
            path = file.relative_to(ROOT)
            path = path.parent if path.name == "__init__.py" else path.with_suffix("")
            found[".".join(path.parts)] = file
    return found


def folder_of(module: str) -> str:
    """The folder of a module's file, as `FOLDERS` names it."""
    return files_by_module()[module].parent.relative_to(ROOT).as_posix()


def own_imports(tree: ast.Module, package: str) -> set[str]:
    """Modules of `package` that a file imports, at any depth; not the package, whose `__init__` holds no code."""
    return {name for name in imported_modules(walk(tree)) if name.startswith(f"{package}.")}


def imports_when_loaded(tree: ast.Module) -> set[str]:
    """Modules that are imported as the file is: what stands in functions or under `TYPE_CHECKING` is left out."""
    return imported_modules(_run_when_loaded(tree))


def imported_modules(nodes: Iterable[ast.AST]) -> set[str]:
    """Modules of the packages that import statements among `nodes` name; `from a import b` may name the module a.b."""
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {name_of_folder(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {name_of_folder(f"{node.module}.{alias.name}") for alias in node.names}
            found |= {name if name in files_by_module() else name_of_folder(node.module) for name in names}
    return found & files_by_module().keys()


def _run_when_loaded(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _run_when_loaded(other)
            continue
        yield child
        yield from _run_when_loaded(child)


def circles(imported: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of names that import each other, directly or through others; each sorted."""
    found: list[list[str]] = []
    for name in sorted(imported):
        reached = _reached(name, imported)
        circle = sorted(other for other in reached if name in _reached(other, imported))
        if circle and circle not in found:
            found.append(circle)
    return found


def _reached(name: str, imported: Mapping[str, set[str]]) -> set[str]:
    reached, left = set[str](), [name]
    while left:
        for other in imported.get(left.pop(), set()) - reached:
            reached.add(other)
            left.append(other)
    return reached


def folder_faults(module: str, tree: ast.Module) -> list[str]:
    """Imports of a module that `FOLDERS` forbids, without those of `NOT_YET`."""
    own = folder_of(module)
    return [
        f"{module} imports {other}, and {own} may import {sorted(FOLDERS[own]) or 'nothing'}"
        for other in sorted(own_imports(tree, module.split(".")[0]))
        if folder_of(other) not in FOLDERS[own] | {own} and (module, other) not in NOT_YET
    ]


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
    for node in walk(tree):
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
        ("protocol", "from slipstream.rollout_queue.ledger.validation import decode_group"),
        ("rollout_queue", "def f():\n    from torch import nn"),
        ("rollout_queue", "if TYPE_CHECKING:\n    import slipstream.rollout_worker.task.task"),
        ("rollout_worker", "import importlib\nimportlib.import_module('torch.nn')"),
        ("weight_sync", "import learner"),
        ("learner", "import slipstream.rollout_queue.ledger.ledger as ledger"),
    ],
)
def test_the_import_rule_finds_what_it_forbids(package: str, source: str) -> None:
    assert len(forbidden_imports(ast.parse(source), Path("file.py"), package)) == 1


def test_a_folder_imports_only_what_its_layer_allows() -> None:
    faults = [fault for module, file in files_by_module().items() for fault in folder_faults(module, tree_of(file))]
    assert faults == []


def test_every_folder_has_a_line_in_the_table() -> None:
    assert {folder_of(module) for module in files_by_module()} == FOLDERS.keys()


def test_an_exception_goes_when_nothing_needs_it() -> None:
    imported = {module: own_imports(tree_of(file), module.split(".")[0]) for module, file in files_by_module().items()}
    assert [one for one in NOT_YET if one[1] not in imported.get(one[0], set())] == []


def test_no_two_folders_import_each_other() -> None:
    """By the table: no line may allow what comes after it. `test_a_folder_imports_only_what_its_layer_allows` ties the
    code to the table."""
    assert circles(FOLDERS) == []


def test_no_two_files_import_each_other() -> None:
    assert circles({module: imports_when_loaded(tree_of(file)) for module, file in files_by_module().items()}) == []


def test_the_folder_rule_finds_what_it_forbids() -> None:
    tree = ast.parse("def f():\n    from slipstream.weight_sync.vllm.engine import shadow")
    (fault,) = folder_faults("weight_sync.transports.gloo.sender", tree)
    assert fault.startswith("weight_sync.transports.gloo.sender imports weight_sync.vllm.engine.shadow, and")
    assert folder_faults("weight_sync.vllm.worker", tree) == []


@pytest.mark.parametrize(
    ("imported", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [["b", "c"]]),
        ({"a": {"a"}}, [["a"]]),
    ],
)
def test_circles_are_found(imported: dict[str, set[str]], found: list[list[str]]) -> None:
    assert circles(imported) == found


def test_only_imports_that_run_with_the_file_can_make_a_circle() -> None:
    source = """
if TYPE_CHECKING:
    import slipstream.protocol.client
else:
    import slipstream.protocol.codec
def f():
    import slipstream.protocol.status
class A:
    from slipstream.protocol import reasons
"""
    assert imports_when_loaded(ast.parse(source)) == {"protocol.codec", "protocol.reasons"}


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


@pytest.mark.parametrize(
    "module",
    ["slipstream.protocol.config", "slipstream.protocol.client", "slipstream.rollout_queue.service", "slipstream"],
)
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
from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.transports.base import build_transport
from slipstream.weight_sync.transports.registry import TRANSPORTS
import slipstream.weight_sync.publisher
for name in ("auto", *TRANSPORTS):
    build_transport(WeightSyncSection(transport=name))
assert "vllm" not in sys.modules
"""


def test_a_learner_needs_no_vllm_beside_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_VLLM], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_vllm_is_imported_by_its_own_end_alone() -> None:
    """`slipstream.weight_sync.vllm` runs inside vLLM's processes."""
    found = [
        (file.relative_to(ROOT), use)
        for package in MAY_IMPORT
        for file in sources(package)
        for use in imports(tree_of(file), file)
        if use.what.split(".")[0] == "vllm"
    ]
    inside = {(file, use) for file, use in found if "vllm" in file.parts}
    assert [one for one in found if one not in inside] == []


def test_the_commands_name_no_store() -> None:
    """`slipstream.rollout_queue.store` opens what queue.store names; its variants are their own files."""
    for path in (ROOT / "deploy").rglob("*.py"):
        named = re.findall(r"rollout_queue\.store\.(?:sqlite|postgres|memory|migrations|sql)\w*", path.read_text())
        assert not named, path


def test_slipstream_is_the_only_name_that_is_imported_and_installed() -> None:
    """A project's own `deploy.py` or `protocol/` stands next to an installed Slipstream."""
    bare = [
        use
        for folder in (*MAY_IMPORT, "tests", "benchmarks", "examples", "docs")
        for file in sources(folder)
        for node in walk(tree_of(file))
        for use in imported_names(node, file)
        if use.what.split(".")[0] in LINKED
    ]
    assert bare == []
    assert {link.name: link.resolve() for link in (ROOT / "slipstream").iterdir() if link.is_symlink()} == {
        name: ROOT / name for name in LINKED
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"] == {"include": ["slipstream*"]}


@pytest.mark.parametrize(
    ("room", "by"),
    [
        ("rollout_worker.inference.wire", {"rollout_worker.inference.client"}),
        ("rollout_worker.inference.client", {"rollout_worker.worker", "deploy.planning.probe"}),
        ("learner.training.trainer", {"learner.run"}),
    ],
)
def test_what_stands_behind_a_port_is_known_where_it_is_made_alone(room: str, by: set[str]) -> None:
    modules = files_by_module().items()
    assert {name for name, file in modules if room in {use.what for use in imports(tree_of(file), file)}} == by
