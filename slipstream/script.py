"""A run that a Python script starts, where the command line would be `slipstream up run.toml`.

A run's messages name options of the command line; here they name what a script gives in their place.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

from deploy.run.process_keeper import RunFailed
from deploy.run.supervisor import supervise
from protocol.config import ConfigError, RunConfig, parse_overrides, resolve
from protocol.config.load import TASK_MODULE_PREFIX
from protocol.config.sections.base import toml_value
from rollout_worker.task.task import Task


@dataclass(frozen=True)
class Words:
    """resume: the argument that goes on with a run; name, model: the one that gives a run's name or its model, to which
    that value is given; name_setting: what messages call `run.name`."""

    resume: str
    name: Callable[[str], str]
    model: Callable[[str], str]
    name_setting: str = "run.name"

    def said(self, text: str) -> str:
        """The message as it is to be read in a script."""
        text = re.sub(r"--resume\b", self.resume, text)
        text = re.sub(r"--run\.name (?!and )([^\s;,:]+)", lambda given: self.name(given[1]), text)
        text = re.sub(r"--model\.path ([^\s;,]+)", lambda given: self.model(given[1]), text)
        text = re.sub(r"--run\.name\b", f"another {self.name_setting}", text)
        return re.sub(r"(?m)^run\.name = ", f"{self.name_setting} = ", text)


TRAIN = Words("resume=True", lambda name: f"run={{'name': {name!r}}}", lambda path: f"model={{'path': {path!r}}}")


def of_a_trainer(run_dir: Path) -> Words:
    """Of one of `slipstream.trl`, whose `output_dir` is `run_dir`."""
    return Words(
        "resume_from_checkpoint=True",
        lambda name: f"output_dir={str(run_dir.parent / name)!r}",
        lambda path: f"model={path!r}",
        "output_dir",
    )


_REMEDY = "put the task into a .py file as a global, or name that file in a run file and start it with: slipstream up"


_Arguments = ParamSpec("_Arguments")

_Result = TypeVar("_Result")


def without_frames(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`ConfigError` and `RunFailed` leave it without the frames beneath: the message says it all, and so it is also
    what a reader sees first."""

    @functools.wraps(function)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except (ConfigError, RunFailed) as error:
            raise error.with_traceback(None) from None

    return called


class HoldsTask(Protocol):
    """What a worker finds as a global of the script: a trainer of `slipstream.trl`, for one."""

    @property
    def task(self) -> Task: ...


def train(
    task: Task | HoldsTask, run_file: str | Path | None = None, *, resume: bool = False, **sections: Mapping[str, Any]
) -> dict[str, Any]:
    """Run everything on this machine until the learner is done; returns what `summary.json` holds.

        task = Task(dataset=..., rewards=[...])

        if __name__ == "__main__":
            train(task, model={"path": "Qwen/Qwen3-0.6B"}, learner={"steps": 100})

    sections: those of a run file; they override `run_file`'s. Paths in them are taken from the working directory.
    resume: go on from the newest checkpoint. Every worker imports the script as its task file, so `task` must be a
    global of it, and the call must stand under `if __name__ == "__main__":`.

    Raises `ConfigError` for what cannot work, before anything is started, and `RunFailed`. Ctrl-C ends all processes,
    then raises KeyboardInterrupt.
    """
    return run(task, run_file, resume, sections)


@without_frames
def run(
    task: Task | HoldsTask,
    run_file: str | Path | None,
    resume: bool,
    sections: Mapping[str, Mapping[str, Any]],
    words: Words = TRAIN,
) -> dict[str, Any]:
    """As `train`, with all sections in one; that of the task may hold settings, too. words: those of the script, for
    messages."""
    _refuse_while_loading_a_task()
    _refuse_in_an_event_loop()
    path = {"path": path_of(task)}
    config = _load(run_file, {**sections, "task": {**sections.get("task", {}), **path}})
    # The learner's last line says how to go on.
    os.environ["SLIPSTREAM_RESUME"] = words.resume
    try:
        supervise(config, resume)
    except (ConfigError, RunFailed) as error:
        error.args = (words.said(str(error)),)
        raise
    summary: dict[str, Any] = json.loads((config.run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary


def loading_a_task() -> str | None:
    """The file that is being imported for its task, by whatever it has called; None if there is none."""
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
    """Where a worker finds the task: path/to/file.py:name."""
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


def _name_in(module: object, task: object) -> str | None:
    names = list(getattr(module, "__dict__", {}).items())
    return next((name for name, value in names if value is task), None)


def _load(run_file: str | Path | None, sections: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    return resolve(run_file, overrides(sections), "train()", needs=("task", "model", "chat"))


def overrides(sections: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    """The sections as the command line would give them; raises `ConfigError`."""
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
