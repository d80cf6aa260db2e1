"""Reads classes of vLLM from their source, since a CPU cannot import some of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourceTree:
    """The Python files of a package.

    Args:
        root: Folder of the package, such as `site-packages/vllm`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parse = lru_cache(maxsize=None)(self._parsed)

    def find_class(self, module: str, name: str) -> ast.ClassDef | None:
        """Returns a class by its module (`vllm.config.vllm`), followed through re-exports; None if it is not there."""
        tree = self._parse(module)
        if tree is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                node.module = module  # type: ignore[attr-defined]
                return node
        return next((self.find_class(*found) for found in _imports(tree, module, name)), None)

    def members(self, found: ast.ClassDef) -> dict[str, Function | None]:
        """Returns the attributes, properties and methods of a class and its bases. Methods come with their syntax."""
        named: dict[str, Function | None] = {}
        tree = self._parse(found.module)  # type: ignore[attr-defined]
        for base in found.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and tree is not None:
                above = self.find_class(found.module, base.id)  # type: ignore[attr-defined]
                if above is not None and above is not found:
                    named |= self.members(above)
        for node in found.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                named[node.target.id] = None
            elif isinstance(node, ast.Assign):
                named |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, Function):
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                named[node.name] = None if is_property else node
                named |= dict.fromkeys(_set_on_self(node))
        return named

    def _parsed(self, module: str) -> ast.Module | None:
        path = self._root.joinpath(*module.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None


def _imports(tree: ast.Module, module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yields the modules and names that `name` may be imported from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.startswith(module.split(".")[0]):
                    yield node.module, alias.name


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
