"""Objects that a setting names as path/to/file.py:name. The file is imported, as far as the object needs."""

from __future__ import annotations

import importlib.util
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from protocol.config import ConfigError

# What the modules of such files are called, each with the file's own name behind.
MODULE = "slipstream_task_"


class _Reached(BaseException):
    """Ends the import of a file; no error, so that no `except Exception` of the file's holds it up."""


class _Importing(NamedTuple):
    module: ModuleType
    object_name: str


_importing: ContextVar[_Importing | None] = ContextVar("importing", default=None)


def import_for(named: str, setting: str) -> ModuleType:
    """The module of the file in `named`, path/to/file.py:name, which `setting` has as its value. Raises `ConfigError`
    where the file cannot be imported; that it has the name is not looked at."""
    path, _, object_name = named.rpartition(":")
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"{MODULE}{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{setting} = {named}: there is no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    before = _importing.set(_Importing(module, object_name))
    try:
        spec.loader.exec_module(module)
    except _Reached:
        pass
    except ConfigError as error:
        raise ConfigError(f"{setting} = {named}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting} = {named}: {file} cannot be imported: {type(error).__name__}: {error}; "
            f"run it with python to see where"
        ) from error
    finally:
        _importing.reset(before)
    return module


def end_import_at(holder: Any) -> None:
    """End the import of the file that runs, where `holder` is the object, or has the task, that it is imported for:
    what follows in the file is not for workers. It returns where anything else is wanted, or nothing."""
    importing = _importing.get()
    if importing is None:
        return
    wanted = getattr(importing.module, importing.object_name, None)
    if wanted is not None and (wanted is holder or wanted is getattr(holder, "task", None)):
        raise _Reached
