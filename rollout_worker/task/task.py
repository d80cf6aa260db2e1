"""The task: what the user writes in a file of their own and names in the run file as `path/to/file.py:task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from protocol.config import ConfigError, TaskSection
from protocol.config.load import import_for
from rollout_worker.data import columns
from rollout_worker.data.dataset import DataSource, is_lazy, named_eval, open_eval_rows, open_rows
from rollout_worker.data.rows import Row, RowPosition, Rows
from rollout_worker.task import environments
from rollout_worker.task.agent import Agent
from rollout_worker.task.reward_base import OWN_REWARD
from rollout_worker.task.rewards import RewardFunctions
from rollout_worker.tools.base import Tool
from rollout_worker.tools.function import is_tool
from rollout_worker.tools.mcp import check_addresses
from rollout_worker.tools.toolbox import ToolBox

__all__ = ["Row", "Task", "load_task"]

_NOT_GIVEN: Sequence[Any] = ()


@dataclass(frozen=True)
class Task:
    """What the policy is to learn.

    dataset: rows with a `prompt` column (messages, or text) and whatever columns the rewards read. A list of mappings,
    a `datasets.Dataset`, any sequence of mappings; an iterable that can be iterated again and again, such as a
    `datasets.IterableDataset`, or a function that makes one; a file (.jsonl, .json, .csv, .parquet, .arrow, each also
    with .gz), folder or glob, from the task file's folder or else the working directory; a name on the hub.
    dataset_split, dataset_config: which part of a file, folder or hub's data set; the split is train. Files, the hub
    and iterables are read when `rows` is used first, which a task file's import does not.

    tools: sync or async functions with type hints and a Google-style docstring, or `Tool` objects. mcp_servers: URLs or
    command lines of MCP servers, connected where the task runs. rewards: `f(completions, prompts, completion_ids,
    **columns)` giving one float or None per rollout, sync or async, or the name of a classifier that
    `task.reward_servers` has a server for; one or several. reward_weights: one per reward, 1 by default.
    environment: a class, or a function that gives an instance, which an episode is played in: its `reset(**columns)`
    begins the episode, its public methods are tools, its `get_reward()`, if it has one, rewards it (then `rewards` may
    be left out), its `respond(messages)`, if it has one, answers turns that call nothing. Or several by name, of which
    each row names its own in the column `environment`. With one alone the data set's prompts, or all of it, may be left
    out. agent: a program that owns its loop, in place of tools: `agent(endpoint, **columns)`, sync or async, called
    once an episode (docs/agents.md). eval_dataset: rows that are evaluated on and never trained on, in any of the forms
    of dataset; eval_dataset_split: which part of it. It is read only where evaluations are on, see [eval] of the run
    file. TRL's names may be used in place of ours: train_dataset, reward_funcs, environment_factory. Raises
    `ConfigError`.
    """

    dataset: DataSource = _NOT_GIVEN
    rewards: Sequence[Callable[..., Any] | str] = _NOT_GIVEN
    tools: Sequence[Callable[..., Any] | Tool] = ()
    mcp_servers: Sequence[str] = ()
    environment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None
    agent: Callable[..., Any] | None = None
    reward_weights: Sequence[float] | None = None
    eval_dataset: DataSource | None = None
    eval_dataset_split: str | None = None
    dataset_split: str | None = None
    dataset_config: str | None = None
    train_dataset: InitVar[DataSource | None] = None
    reward_funcs: InitVar[Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None] = None
    environment_factory: InitVar[Callable[..., Any] | Mapping[str, Callable[..., Any]] | None] = None
    # Of the task file; `load_task` sets it.
    folder: Path | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self, train_dataset: Any, reward_funcs: Any, environment_factory: Any) -> None:
        self._take("dataset", "train_dataset", train_dataset, _NOT_GIVEN)
        self._take("rewards", "reward_funcs", reward_funcs, _NOT_GIVEN)
        self._take("environment", "environment_factory", environment_factory, None)
        if callable(self.rewards) or isinstance(self.rewards, str):
            object.__setattr__(self, "rewards", [self.rewards])
        object.__setattr__(self, "tools", self.tools or ())
        if self.agent is not None:
            self._check_agent(self.agent)
        if self.environment is not None:
            environments.check_environment(self.environment, self.rewards)
            if self.has_no_data and isinstance(self.environment, Mapping):
                raise ConfigError(
                    "Task(environment={...}): of several environments each row names its own; give a dataset with a "
                    "column 'environment'"
                )
        check_addresses(self.mcp_servers)
        self._checked_rewards()
        ToolBox(self.tools)
        if not is_lazy(self.dataset):
            _ = self.rows
        if self.eval_dataset_split is not None and self.eval_dataset is None:
            raise ConfigError(
                f"Task(eval_dataset_split={self.eval_dataset_split!r}) without an eval_dataset: give it too; it may be "
                f"the dataset itself, of which this is another part"
            )
        if self.eval_dataset is not None and not is_lazy(self.eval_dataset):
            _ = self.eval_rows

    def _check_agent(self, agent: Callable[..., Any]) -> None:
        Agent(agent)
        given = {"tools": self.tools, "mcp_servers": self.mcp_servers, "environment": self.environment}
        if others := [f"{name}=..." for name, value in given.items() if value]:
            raise ConfigError(
                f"Task(agent=..., {', '.join(others)}): an agent runs its own loop, and names its tools in its "
                f"requests; leave out {' and '.join(others)}, or the agent"
            )

    def _take(self, name: str, trls: str, value: Any, absent: Any) -> None:
        """A value that was given by TRL's name."""
        if value is None:
            return
        if getattr(self, name) is not absent:
            raise ConfigError(f"Task({name}=..., {trls}=...): these are two names of the same; give one of them")
        object.__setattr__(self, name, value)

    @cached_property
    def rows(self) -> Rows:
        """The data set's rows, loaded when they are asked for first. Raises `ConfigError`, also for a first row that
        no run could use."""
        if self.has_no_data and self.environment is None:
            raise ConfigError(
                "Task(...) has no dataset; give dataset=[...], a row for each prompt, with a 'prompt' column"
            )
        data = [{}] if self.has_no_data else self.dataset
        return self._checked(open_rows(data, self.dataset_split, self.dataset_config, self.folder))

    @cached_property
    def eval_rows(self) -> Rows:
        """The rows of `eval_dataset`, loaded when they are asked for first; it must be given. Raises `ConfigError` as
        `rows` does."""
        rows = open_eval_rows(
            self.eval_dataset, self.eval_dataset_split, self.dataset_config, self.dataset, self.folder
        )
        try:
            return self._checked(rows)
        except ConfigError as error:
            raise named_eval(error) from None

    def _checked(self, rows: Rows) -> Rows:
        """The rows, if a run could use the first."""
        if self.environment is not None:
            rows = environments.WithPrompts(rows)
        first = next((row for _, row in rows.sample(1)), None)
        if first is None:
            raise ConfigError("Task(dataset=...) is empty; give at least one row with a 'prompt' column")
        columns.check_first(first, bool(self.tools or self.mcp_servers), self.environment is not None)
        if self.environment is not None and (fault := environments.check_row(self.environment, first)):
            raise ConfigError(f"Task(environment={{...}}): the first row cannot be played: {fault}")
        self._checked_rewards().check_signatures(first)
        if self.agent is not None:
            Agent(self.agent).check(first)
        return rows

    @property
    def has_no_data(self) -> bool:
        """Whether no data set was given: an environment's reset then says what there is to do."""
        return self.dataset is _NOT_GIVEN

    @property
    def own_rewards(self) -> Sequence[str] | None:
        """The rewards that episodes may bring themselves; None where an environment's class says later which."""
        if self.agent is not None:
            return (OWN_REWARD,)
        return () if self.environment is None else None

    @property
    def may_isolate(self) -> bool:
        """Whether worker.tool_isolation = "process" is taken with it: for tools alone, that are functions."""
        return self.agent is None and self.environment is None and not any(map(is_tool, self.tools))

    def _checked_rewards(self) -> RewardFunctions:
        return RewardFunctions(self.rewards, self.reward_weights, own=self.own_rewards)

    def row_for(self, index: int, seed: int, shuffle: bool = True) -> Row:
        """The row of a ticket's running `index`, the same on every worker; `shuffle`: a new order for each epoch."""
        return self.rows.row_for(index, seed, shuffle)

    def place_of(self, index: int, seed: int, shuffle: bool = True) -> RowPosition:
        """The epoch of a ticket's running `index`, and the row's place in the data set."""
        return self.rows.place_of(index, seed, shuffle)


def load_task(task_file: TaskSection) -> Task:
    """The task object that `task_file` names; raises `ConfigError`."""
    module = import_for(task_file.path, "task.path")
    if not hasattr(module, task_file.object_name):
        tasks = [name for name, value in vars(module).items() if isinstance(value, Task)]
        found = f"it has {', '.join(tasks)}" if tasks else "it has no Task"
        raise ConfigError(
            f"task.path = {task_file.path}: {task_file.file} defines no {task_file.object_name!r}, {found}; "
            f"define it there or name another object after the colon"
        )
    task = getattr(module, task_file.object_name)
    task = getattr(task, "task", task)  # a trainer, as slipstream.trl makes one, holds its task
    if not isinstance(task, Task):
        raise ConfigError(
            f"task.path = {task_file.path}: {task_file.object_name} is a {type(task).__name__}, not a Task; "
            f"write {task_file.object_name} = slipstream.Task(dataset=..., rewards=[...])"
        )
    object.__setattr__(task, "folder", task_file.file.resolve().parent)
    return task
