"""Starts a run from a Python script, as `slipstream up run.toml` does from the command line.

Messages of a run name options of the command line; here they are reworded to name the script's arguments.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.deploy.run.supervisor import supervise
from slipstream.protocol.config import ConfigError, RunConfig, parse_overrides, resolve
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.user_files import ARGUMENTS, TASK_MODULE_PREFIX, imported_file, start_name
from slipstream.rollout_worker.task.task import Task


@dataclass(frozen=True)
class Words:
    """A script's words for options of the command line.

    Attributes:
        resume: Argument that resumes a run.
        name: Writes the argument that sets a run's name to a value.
        model: Writes the argument that sets the model to a value.
        name_setting: What messages call `run.name`.
        trainer: The trainer's class, of a trainer of `slipstream.trl`.
    """

    resume: str
    name: Callable[[str], str]
    model: Callable[[str], str]
    name_setting: str = "run.name"
    trainer: str | None = None

    def reworded(self, text: str) -> str:
        """Return the message with the script's words."""
        text = re.sub(rf":{start_name(0).replace('0', '[0-9]+')}", "", text)  # a trainer in a function has no name
        text = re.sub(r"--resume\b", self.resume, text)
        text = re.sub(r"--run\.name (?!and )([^\s;,:]+)", lambda given: self.name(given[1]), text)
        text = re.sub(r"--model\.path ([^\s;,]+)", lambda given: self.model(given[1]), text)
        text = re.sub(r"--run\.name\b", f"another {self.name_setting}", text)
        if self.trainer is not None:
            text = in_arguments(text, self.trainer)
        return re.sub(r"(?m)^run\.name = ", f"{self.name_setting} = ", text)


TRAIN = Words("resume=True", lambda name: f"run={{'name': {name!r}}}", lambda path: f"model={{'path': {path!r}}}")


def of_a_trainer(run_dir: Path, trainer: str) -> Words:
    """Return the words of a trainer of `slipstream.trl`.

    Args:
        run_dir: Its `output_dir`.
        trainer: Its class.
    """
    return Words(
        "resume_from_checkpoint=True",
        lambda name: f"output_dir={str(run_dir.parent / name)!r}",
        lambda path: f"model={path!r}",
        "output_dir",
        trainer,
    )


# Arguments of TRL's trainers, by those of a task.
_OF_TASK = {
    "dataset": "train_dataset",
    "eval_dataset": "eval_dataset",
    "rewards": "reward_funcs",
    "tools": "tools",
    "environment": "environment_factory",
}


def in_arguments(text: str, trainer: str) -> str:
    """Return a message about a task or its model with the arguments of a trainer of TRL's.

    Args:
        text: The message.
        trainer: The trainer's class.
    """
    text = re.sub(rf"\bTask\(({'|'.join(_OF_TASK)})=", lambda given: f"{trainer}({_OF_TASK[given[1]]}=", text)
    text = text.replace("Task(reward_weights=", f"{trainer.removesuffix('Trainer')}Config(reward_weights=")
    return re.sub(r"(?m)^model\.path = ([^\s:,]+)", lambda given: f"{trainer}(model={given[1]!r})", text)


_REMEDY = "put the task into a .py file as a global, or name that file in a run file and start it with: slipstream up"


_Arguments = ParamSpec("_Arguments")

_Result = TypeVar("_Result")


def without_frames(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Remove the inner frames from a `ConfigError`, `RunFailed` or Ctrl-C, so that a reader sees its message first."""

    @functools.wraps(function)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except (ConfigError, RunFailed, KeyboardInterrupt) as error:
            raise error.with_traceback(None) from None

    return called


class HoldsTask(Protocol):
    """An object that holds a task, such as a trainer of `slipstream.trl`. Workers find it as a global of the script."""

    @property
    def task(self) -> Task: ...


def train(
    task: Task | HoldsTask, run_file: str | Path | None = None, *, resume: bool = False, **sections: Mapping[str, Any]
) -> dict[str, Any]:
    """Run everything on this machine until the learner is done.

        task = Task(dataset=..., rewards=[...])

        if __name__ == "__main__":
            train(task, model={"path": "Qwen/Qwen3-0.6B"}, learner={"steps": 100})

    Every worker imports the script as its task file, so the call must stand under `if __name__ == "__main__":`.

    Args:
        task: The task, a global of the script.
        run_file: A run file; None for the defaults.
        resume: Whether to continue from the newest checkpoint.
        sections: Sections of a run file, which override `run_file`. Paths in them start at the working directory.

    Returns:
        The contents of `summary.json`.

    Raises:
        ConfigError: A setting cannot work; nothing was started.
        RunFailed: The run ended for another reason.
        KeyboardInterrupt: Ctrl-C; all processes have ended.
    """
    return run(task, run_file, resume, sections)


@without_frames
def run(
    task: Task | HoldsTask,
    run_file: str | Path | None,
    resume: bool,
    sections: Mapping[str, Mapping[str, Any]],
    words: Words = TRAIN,
    place: str | None = None,
) -> dict[str, Any]:
    """Run as `train` does, with all sections in one mapping.

    Args:
        words: The script's words, for messages.
        place: Where processes find the task; None to look for it.
    """
    _refuse_while_loading_a_task()
    _refuse_in_an_event_loop()
    path = {"path": place or path_of(task)}
    os.environ[ARGUMENTS] = json.dumps(sys.argv[1:])
    config = _load(run_file, {**sections, "task": {**sections.get("task", {}), **path}})
    # The learner's last line names this argument as the way to continue.
    os.environ["SLIPSTREAM_RESUME"] = words.resume
    try:
        supervise(config, resume)
    except (ConfigError, RunFailed) as error:
        error.args = (words.reworded(str(error)),)
        raise
    made = config.run_dir / "summary.json"
    summary: dict[str, Any] = json.loads(made.read_text(encoding="utf-8")) if made.exists() else {}
    return summary


def loading_a_task() -> str | None:
    """Return the file that is being imported for its task and has led to this call; None if there is none."""
    if file := imported_file():
        return file
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(TASK_MODULE_PREFIX):
            return frame.f_code.co_filename
        frame = frame.f_back
    return None


def _refuse_while_loading_a_task() -> None:
    if file := loading_a_task():
        raise ConfigError(
            f"{file} calls train() whenever it is imported, and every worker imports it for its task; put the call "
            f'under: if __name__ == "__main__":'
        )


def _refuse_in_an_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError(
        "train() cannot be called while an event loop is running, as in a notebook or an async function; call it from "
        "a plain script, or start the run with: slipstream up run.toml"
    )


def path_of(task: Task | HoldsTask) -> str:
    """Return where a worker finds the task, as path/to/file.py:name. Raises `ConfigError` if it could not."""
    if not isinstance(task, Task) and not isinstance(getattr(task, "task", None), Task):
        raise ConfigError(f"train(task): the task is a {type(task).__name__}; give a Task(dataset=..., rewards=[...])")
    main = sys.modules["__main__"]
    holders = [module for module in (main, *list(sys.modules.values())) if _name_in(module, task)]
    for module in holders:
        file = getattr(module, "__file__", None) or ""
        if file.endswith(".py"):
            return f"{Path(file).absolute()}:{_name_in(module, task)}"
    if not holders:
        raise ConfigError(f"train(task): the task is not a global of any module, so no worker can import it; {_REMEDY}")
    raise ConfigError(
        f"train(task): the task {_name_in(holders[0], task)!r} stands in a session or a script that is not a .py file, "
        f"so no worker can import it; {_REMEDY}"
    )


def place_of(holder: HoldsTask, start: int, by_start: bool = False) -> str:
    """Return where a worker finds a trainer: as `path_of`, and if it is no global, by the start of the run it is for.

    Args:
        holder: The trainer.
        start: Number of the start in this process.
        by_start: Whether the trainer's task is another than where it is made, so that its name would not do.

    Raises:
        ConfigError: There is no script that a worker could run.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None) or ""
    runnable = file.endswith(".py") and getattr(main, "__spec__", None) is None
    name = _name_in(main, holder)
    if runnable and (by_start or (name is not None and not _bound_at_import(Path(file), name))):
        return f"{Path(file).absolute()}:{start_name(start)}"
    try:
        return path_of(holder)
    except ConfigError:
        if not runnable:
            raise
    return f"{Path(file).absolute()}:{start_name(start)}"


def _bound_at_import(file: Path, name: str) -> bool:
    """Tell whether a script binds a global when it is imported, and not under `if __name__ == "__main__"` alone."""

    def binds(nodes: Iterable[ast.AST]) -> bool:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                continue
            nodes_of: Iterable[ast.AST] = ast.iter_child_nodes(node)
            if isinstance(node, ast.If) and any(
                isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
            ):
                nodes_of = node.orelse
            if (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)) or binds(nodes_of):
                return True
        return False

    return binds(ast.parse(file.read_bytes()).body)


def _name_in(module: object, task: object) -> str | None:
    names = list(getattr(module, "__dict__", {}).items())
    return next((name for name, value in names if value is task), None)


def _load(run_file: str | Path | None, sections: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    return resolve(run_file, overrides(sections), "train()", needs=("task", "model", "chat"))


def overrides(sections: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    """Return the sections as the command line would give them. Raises `ConfigError` for a section that is no dict."""
    given: list[str] = []
    for section, settings in sections.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"train({section}={settings!r}): must be a dict of settings, such as learner={{'steps': 100}}"
            )
        for key, value in settings.items():
            if value is not None:
                given += [f"--{section}.{key}", toml_value(value)]
    return parse_overrides(given)
