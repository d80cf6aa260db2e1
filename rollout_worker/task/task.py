"""The task: what the user writes in a file of their own and names in the run file as `path/to/file.py:task`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.config import ConfigError, TaskSection
from rollout_worker.task.rewards import RewardFunctions
from rollout_worker.task.tools import Tool, ToolBox
from rollout_worker.task.tools.mcp import check_addresses

RESERVED_COLUMNS = ("completions", "prompts", "completion_ids")


class Row(NamedTuple):
    """A row of the data set, the epoch that it is drawn in, and its place in the data set."""

    epoch: int
    number: int
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """What the policy is to learn.

    dataset: rows with a `prompt` column (messages, or text) and whatever columns the rewards read; a list of
    mappings, a `datasets.Dataset`, or any sequence of mappings. tools: sync or async functions with type hints
    and a Google-style docstring, or `Tool` objects. mcp_servers: URLs or command lines of MCP servers, connected where
    the task runs. rewards: `f(completions, prompts, completion_ids, **columns)` giving one float or
    None per rollout, sync or async. reward_weights: one per reward, 1 by default. environment_factory and
    eval_dataset are refused until they are supported. Raises `ConfigError`.
    """

    dataset: Sequence[Mapping[str, Any]]
    rewards: Sequence[Callable[..., Any]]
    tools: Sequence[Callable[..., Any] | Tool] = ()
    environment_factory: Callable[..., Any] | None = None
    reward_weights: Sequence[float] | None = None
    eval_dataset: Sequence[Mapping[str, Any]] | None = None
    mcp_servers: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.environment_factory is not None:
            raise ConfigError("Task(environment_factory=...) is not supported yet; give the functions as tools=[...]")
        if self.eval_dataset is not None:
            raise ConfigError("Task(eval_dataset=...) is not supported yet; leave it out")
        check_addresses(self.mcp_servers)
        first = _first_row(self.dataset, bool(self.tools or self.mcp_servers))
        RewardFunctions(self.rewards, self.reward_weights).check_signatures(first)
        ToolBox(self.tools)

    def row_for(self, index: int, seed: int) -> Row:
        """The row of a ticket's running `index`: reshuffled every epoch, the same on every worker."""
        epoch, number = self.place_of(index, seed)
        return Row(epoch, number, self.dataset[number])

    def place_of(self, index: int, seed: int) -> tuple[int, int]:
        """The epoch of a ticket's running `index`, and the row's place in the data set."""
        epoch, position = divmod(index, len(self.dataset))
        return epoch, int(_permutation(len(self.dataset), seed, epoch)[position])


def load_task(task_file: TaskSection) -> Task:
    """The task object that `task_file` names; raises `ConfigError`."""
    module = _import(task_file)
    if not hasattr(module, task_file.object_name):
        tasks = [name for name, value in vars(module).items() if isinstance(value, Task)]
        found = f"it has {', '.join(tasks)}" if tasks else "it has no Task"
        raise ConfigError(
            f"task.path = {task_file.path}: {task_file.file} defines no {task_file.object_name!r}, {found}; "
            f"define it there or name another object after the colon"
        )
    task = getattr(module, task_file.object_name)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task.path = {task_file.path}: {task_file.object_name} is a {type(task).__name__}, not a Task; "
            f"write {task_file.object_name} = slipstream.Task(dataset=..., rewards=[...])"
        )
    return task


def _import(task_file: TaskSection) -> ModuleType:
    file = task_file.file.resolve()
    spec = importlib.util.spec_from_file_location(f"slipstream_task_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"task.path = {task_file.path}: there is no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"task.path = {task_file.path}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"task.path = {task_file.path}: {file} cannot be imported: {type(error).__name__}: {error}; "
            f"run it with python to see where"
        ) from error
    return module


def _first_row(dataset: Sequence[Mapping[str, Any]], has_tools: bool) -> Mapping[str, Any]:
    """The data set's first row, checked."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"Task(dataset=...) is a {type(dataset).__name__}; give a sequence of rows, such as a list of dicts"
        )
    if len(dataset) == 0:
        raise ConfigError("Task(dataset=...) is empty; give at least one row with a 'prompt' column")
    row = dataset[0]
    if not isinstance(row, Mapping) or "prompt" not in row:
        columns = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise ConfigError(f"Task(dataset=...): the first row has no 'prompt' column, it has {columns}; add one")
    if taken := [name for name in RESERVED_COLUMNS if name in row]:
        raise ConfigError(
            f"Task(dataset=...): the column {taken[0]!r} is a name that reward functions already get; rename it"
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if has_tools:
            raise ConfigError(
                "Task(tools=...): the prompts are text, and tools need a conversation; make each prompt a list of "
                "messages: [{'role': 'user', 'content': ...}]"
            )
    elif not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
        raise ConfigError(
            f"Task(dataset=...): the first prompt is a {type(prompt).__name__}; give text or a list of messages"
        )
    return row


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of one epoch, int64 [rows]. PCG64 gives the same on every machine."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)
