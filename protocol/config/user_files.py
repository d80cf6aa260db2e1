"""Imports users' files, which settings name as path/to/file.py:name, and runs scripts up to the start of their run.

A trainer that is no global of its script, such as one in a function, has no name. Other processes find it by the number
of the start: the script runs as by `python path/to/script.py`, until it starts a run for that time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from slipstream.protocol.config.load import ConfigError

# Prefix of the names of imported modules; the file's name follows.
TASK_MODULE_PREFIX = "slipstream_task_"

# Name of what the k-th start of a run in a script is given: path/to/script.py:__start_1__.
_START = re.compile(r"__start_(\d+)__")

# The script's arguments, as JSON.
ARGUMENTS = "SLIPSTREAM_SCRIPT_ARGUMENTS"

# Set for a process that writes to the terminal on which the script runs already.
SAME_TERMINAL = "SLIPSTREAM_SAME_TERMINAL"


class _Reached(BaseException):
    """Ends the import of a file. Not an Exception, so that the file's own `except Exception` does not catch it."""


class _Importing:
    """An import that is under way.

    Attributes:
        module: What is imported.
        object_name: What it is imported for.
        starts_left: Starts of a run until the wanted one, if the name is that of a start.
        reached: Whether that start was reached.
    """

    def __init__(self, module: ModuleType, object_name: str) -> None:
        self.module = module
        self.object_name = object_name
        found = _START.fullmatch(object_name)
        self.starts_left = int(found[1]) if found else 0
        self.reached = False


_importing: ContextVar[_Importing | None] = ContextVar("importing", default=None)


def start_name(count: int) -> str:
    """Return the name by which `import_for` finds what the `count`-th start of a run in a script is given."""
    return f"__start_{count}__"


def imported_file() -> str | None:
    """Return the file whose import is under way; None if there is none."""
    importing = _importing.get()
    return importing.module.__file__ if importing else None


def import_for(named: str, setting: str) -> ModuleType:
    """Import the file of `named` (path/to/file.py:name), the value of `setting`. The name in it is not looked up.

    A name from `start_name` runs the file as Python runs a script, up to that start.

    Raises `ConfigError` if the file cannot be imported.
    """
    path, _, object_name = named.rpartition(":")
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"{TASK_MODULE_PREFIX}{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{setting} = {named}: there is no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    importing = _Importing(module, object_name)
    before = _importing.set(importing)
    try:
        if importing.starts_left:
            _run_as_script(module, file)
        else:
            spec.loader.exec_module(module)
    except _Reached:
        pass
    except ConfigError as error:
        raise ConfigError(f"{setting} = {named}: {error}") from None
    except (Exception, SystemExit) as error:
        if importing.reached:  # what the file makes of that does not matter
            return module
        raise ConfigError(
            f"{setting} = {named}: {file} cannot be imported: {type(error).__name__}: {error}; "
            f"run it with python to see where"
        ) from error
    finally:
        _importing.reset(before)
    return module


def _run_as_script(module: ModuleType, file: Path) -> None:
    main, arguments = sys.modules["__main__"], sys.argv
    vars(module)["__name__"] = "__main__"
    sys.modules["__main__"] = module
    sys.argv = [str(file), *json.loads(os.environ.get(ARGUMENTS, "[]"))]
    try:
        # Its results are shown where it runs for its user, and so are its bars and warnings where this process has the
        # same terminal.
        with contextlib.ExitStack() as hidden:
            hidden.enter_context(contextlib.redirect_stdout(_Muted.until_left(sys.stdout, hidden)))
            if os.environ.get(SAME_TERMINAL):
                hidden.enter_context(contextlib.redirect_stderr(_Muted.until_left(sys.stderr, hidden)))
            exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    finally:
        sys.modules["__main__"], sys.argv = main, arguments


class _Muted(io.TextIOBase):
    """A stream that writes nothing until it is left, and then to the real one: a script's logger may keep it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._muted = stream, True

    @classmethod
    def until_left(cls, stream: TextIO, stack: contextlib.ExitStack) -> _Muted:
        made = cls(stream)
        stack.callback(setattr, made, "_muted", False)
        return made

    def write(self, text: str) -> int:
        return len(text) if self._muted else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def end_import_at(holder: Any) -> None:
    """End the import of the running file if `holder` is, or has, the task that it is imported for.

    Workers do not need the rest of the file. Otherwise it returns.
    """
    importing = _importing.get()
    if importing is None:
        return
    if importing.starts_left:
        importing.starts_left -= 1
        if importing.starts_left == 0:
            importing.reached = True
            vars(importing.module)[importing.object_name] = holder
            raise _Reached
        return
    wanted = getattr(importing.module, importing.object_name, None)
    if wanted is not None and (wanted is holder or wanted is getattr(holder, "task", None)):
        raise _Reached
