"""Reads modules, classes and calls of vLLM from its source, since a CPU cannot import some of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A name's definition.

    Attributes:
        node: The module, class or function; None for anything else that a module holds.
        module: The module that has it, or its own name.
    """

    node: ast.Module | ast.ClassDef | Function | None
    module: str


class SourceTree:
    """The Python files of a package.

    Args:
        root: Folder of the package, such as `site-packages/vllm`.
        changed: Texts of files that differ from the folder's, by path.
    """

    def __init__(self, root: Path, changed: Mapping[str, str] | None = None) -> None:
        self._root = root
        self._changed = changed or {}
        self._parse = lru_cache(maxsize=None)(self._parsed)

    def find(self, module: str, name: str) -> Definition | None:
        """Returns what a module (`vllm.config.vllm`) holds by a name, followed through re-exports; None if nothing."""
        tree = self._parse(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return Definition(node, module)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return Definition(None, module)
            if isinstance(node, ast.ImportFrom) and (source := self._imported(node, module)) is not None:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(source, alias.name)
        submodule = self._parse(f"{module}.{name}")
        return Definition(submodule, f"{module}.{name}") if submodule is not None else None

    def members(self, found: Definition) -> dict[str, Function | None]:
        """Returns the attributes, properties and methods of a class and its bases. Methods come with their syntax."""
        named: dict[str, Function | None] = {}
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                above = self.find(found.module, base.id)
                if above is not None and above.node is not found.node and isinstance(above.node, ast.ClassDef):
                    named |= self.members(above)
        for node in found.node.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                named |= dict.fromkeys(_targets(node))
            elif isinstance(node, Function):
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                named[node.name] = None if is_property else node
                named |= dict.fromkeys(_set_on_self(node))
        return named

    def fields(self, found: Definition) -> list[str]:
        """Returns the fields of a class without `__init__`, such as a dataclass, in the order of its arguments."""
        assert isinstance(found.node, ast.ClassDef)
        return [name for node in found.node.body if isinstance(node, ast.AnnAssign) for name in _targets(node)]

    def _imported(self, node: ast.ImportFrom, module: str) -> str | None:
        """Returns the module that a statement of `module` imports from, None if it is not of this package."""
        if not node.level:
            return node.module if node.module and node.module.startswith(module.split(".")[0]) else None
        is_package = (self._root / Path(*module.split(".")[1:]) / "__init__.py").is_file()
        parts = module.split(".")[: len(module.split(".")) + is_package - node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _parsed(self, module: str) -> ast.Module | None:
        path = Path(*module.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (text := self._changed.get(file.as_posix())) is not None:
                return ast.parse(text)
            if (self._root / file).is_file():
                return _parsed(self._root / file)
        return None


@dataclass(frozen=True)
class Use:
    """A use of something imported from vLLM.

    Attributes:
        module, name: Where it is imported from.
        member: The attribute of it that is used, "" for itself.
        call: The call, None if it is not called.
        place: File and line.
    """

    module: str
    name: str
    member: str
    call: ast.Call | None
    place: str


@cache
def uses(file: Path) -> tuple[Use, ...]:
    """Returns the imports from vLLM in one of our files, and the calls and attributes of what they import."""
    return tuple(_uses(file))


def _uses(file: Path) -> Iterator[Use]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    known: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            known |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            yield from (Use(node.module, alias.name, "", None, f"{file.name}:{node.lineno}") for alias in node.names)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        place = f"{file.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Name) and node.id in known and id(node) in called:
            yield Use(*known[node.id], "", called[id(node)], place)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            yield Use(*known[node.value.id], node.attr, called.get(id(node)), place)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module's own level, those under `if` and `try` too."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, inner, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def _set_on_self(function: Function) -> set[str]:
    return {
        target.attr
        for node in ast.walk(function)
        for target in ast.walk(node)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.With)
        and isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
