"""Defines `Task`, which users write in their own file and name in the run file as `path/to/file.py:task`.

Invariant: a task that can be made is valid, except for data that is read later: files, the hub and iterables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.protocol.config import ConfigError, TaskSection
from slipstream.protocol.config.user_files import import_for
from slipstream.rollout_worker.data import columns
from slipstream.rollout_worker.data.dataset import DataSource, is_lazy, named_eval, open_eval_rows, open_rows
from slipstream.rollout_worker.data.rows import Row, RowPosition, Rows
from slipstream.rollout_worker.task import environments
from slipstream.rollout_worker.task.agent import Agent, AgentErrors
from slipstream.rollout_worker.task.reward_base import OWN_REWARD
from slipstream.rollout_worker.task.rewards import RewardFunctions
from slipstream.rollout_worker.task.roles import Roles, UntrainedModel, read_roles
from slipstream.rollout_worker.tools.base import Tool
from slipstream.rollout_worker.tools.function import is_tool
from slipstream.rollout_worker.tools.mcp import check_addresses
from slipstream.rollout_worker.tools.toolbox import ToolBox

__all__ = ["Row", "Task", "load_task"]

_NOT_GIVEN: Sequence[Any] = ()


@dataclass(frozen=True)
class Task:
    """Defines what the policy learns.

    TRL's names may be used in place of Slipstream's: train_dataset, reward_funcs, environment_factory.

    Args:
        dataset: Rows with a `prompt` column (messages, or text; an agent needs none) and the columns that the rewards
            read. One of:

            - a list of mappings, a `datasets.Dataset`, or any sequence of mappings;
            - an iterable that can be iterated again and again, such as a `datasets.IterableDataset`, or a function that
              makes one;
            - a file (.jsonl, .json, .csv, .parquet, .arrow, each also with .gz), folder or glob, relative to the task
              file's folder or else the working directory;
            - a name on the hub.

            Files, the hub and iterables are read when `rows` is first used. The import of a task file does not use it.
        rewards: One or several rewards. Each is a function `f(completions, prompts, completion_ids, **columns)`, sync
            or async, that returns one float or None per rollout, or the name of a classifier that has a server in
            `task.reward_servers`.
        tools: Sync or async functions with type hints and a Google-style docstring, or `Tool` objects.
        mcp_servers: URLs or command lines of MCP servers, which are connected where the task runs; or mappings with
            address, prefix, include, exclude, transport.
        environment: A class, or a function that returns an instance, for episodes to be played in. Its
            `reset(**columns)` begins the episode, and its other public methods are tools. Optional methods are
            `get_reward()`, which rewards the episode, so that `rewards` may be left out, and `respond(messages)`, which
            answers turns that call no tool. With one environment, the prompts of the data set, or all of it, may be
            left out. Give several environments as a mapping by name. Each row then names its own in the column
            `environment`.
        agent: A program that owns its loop, in place of tools: `agent(endpoint, **columns)`, sync or async, called once
            per episode (docs/agents.md).
        agent_errors: What an agent's errors do: "fail" takes its episode out of the group, as if it had not been
            sampled; a mapping such as {ValueError: 0.0} keeps the episode, with that as the agent's own reward. Choose
            it for errors that bad answers of the policy cause, or the bad samples are those that are never learnt from.
        agents: Roles of an agent that speaks as several, by name: a system prompt (or None) for each that the policy
            plays, an `UntrainedModel` for an opponent or a judge. The agent is called as `agent(endpoints, **columns)`
            and returns a reward for each role that is trained (docs/agents.md).
        reward_weights: One weight per reward, 1 by default.
        eval_dataset: Rows for evaluation, never trained on, in any form that `dataset` takes. They are read only if
            evaluations are on, see [eval] of the run file.
        eval_dataset_split: Split of `eval_dataset`.
        dataset_split: Split of a data set from a file, a folder or the hub, train by default.
        dataset_config: Configuration of a data set from a file, a folder or the hub.

    Raises:
        ConfigError: The task cannot be run as given.
    """

    dataset: DataSource = _NOT_GIVEN
    rewards: Sequence[Callable[..., Any] | str] = _NOT_GIVEN
    tools: Sequence[Callable[..., Any] | Tool] = ()
    mcp_servers: Sequence[str | Mapping[str, Any]] = ()
    environment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None
    agent: Callable[..., Any] | None = None
    agent_errors: AgentErrors = "fail"
    agents: Mapping[str, str | UntrainedModel | None] | None = None
    reward_weights: Sequence[float] | None = None
    eval_dataset: DataSource | None = None
    eval_dataset_split: str | None = None
    dataset_split: str | None = None
    dataset_config: str | None = None
    train_dataset: InitVar[DataSource | None] = None
    reward_funcs: InitVar[Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None] = None
    environment_factory: InitVar[Callable[..., Any] | Mapping[str, Callable[..., Any]] | None] = None
    # Folder of the task file. `load_task` sets it.
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
        elif self.agents is not None:
            raise ConfigError("Task(agents=...) without an agent: give agent=function, which lets them speak")
        elif self.agent_errors != "fail":
            raise ConfigError("Task(agent_errors=...) without an agent: give it too, or leave this out")
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
        Agent(agent, self.agent_errors, self.roles is not None)
        if self.roles is not None and self.rewards:
            raise ConfigError(
                "Task(agents=..., rewards=...): the agent returns a reward for each role; leave out rewards, and "
                "compute them in the agent"
            )
        given = {"tools": self.tools, "mcp_servers": self.mcp_servers, "environment": self.environment}
        if others := [f"{name}=..." for name, value in given.items() if value]:
            raise ConfigError(
                f"Task(agent=..., {', '.join(others)}): an agent runs its own loop, and names its tools in its "
                f"requests; leave out {' and '.join(others)}, or the agent"
            )

    def _take(self, name: str, trls: str, value: Any, absent: Any) -> None:
        """Take over a value that was given by TRL's name."""
        if value is None:
            return
        if getattr(self, name) is not absent:
            raise ConfigError(f"Task({name}=..., {trls}=...): these are two names of the same; give one of them")
        object.__setattr__(self, name, value)

    @cached_property
    def rows(self) -> Rows:
        """The rows of the data set, loaded at the first use.

        Raises:
            ConfigError: The data set is missing or cannot be read, or no run could use its first row.
        """
        if self.has_no_data and self.environment is None:
            raise ConfigError(
                "Task(...) has no dataset; give dataset=[...], a row for each prompt, with a 'prompt' column"
            )
        data = [{}] if self.has_no_data else self.dataset
        return self._checked(open_rows(data, self.dataset_split, self.dataset_config, self.folder))

    @cached_property
    def eval_rows(self) -> Rows:
        """The rows of `eval_dataset`, loaded at the first use. It must be given.

        Raises:
            ConfigError: As for `rows`.
        """
        rows = open_eval_rows(
            self.eval_dataset, self.eval_dataset_split, self.dataset_config, self.dataset, self.folder
        )
        try:
            return self._checked(rows)
        except ConfigError as error:
            raise named_eval(error) from None

    def _checked(self, rows: Rows) -> Rows:
        """Return the rows if a run could use the first one. Raises `ConfigError` otherwise."""
        if self.environment is not None or self.agent is not None:
            rows = columns.WithPrompts(rows)
        first = next((row for _, row in rows.sample(1)), None)
        if first is None:
            raise ConfigError("Task(dataset=...) is empty; give at least one row with a 'prompt' column")
        columns.check_first(first, bool(self.tools or self.mcp_servers), self.environment is not None)
        if self.environment is not None and (fault := environments.check_row(self.environment, first)):
            raise ConfigError(f"Task(environment={{...}}): the first row cannot be played: {fault}")
        self._checked_rewards().check_signatures(first)
        if self.agent is not None:
            Agent(self.agent, has_roles=self.roles is not None).check_row(columns.without_empty_prompt(first))
        return rows

    @property
    def has_no_data(self) -> bool:
        """True if no data set was given. The environment's `reset` then provides the prompt."""
        return self.dataset is _NOT_GIVEN

    @cached_property
    def roles(self) -> Roles | None:
        """The roles of its agent; None where it has one. Raises `ConfigError`."""
        return None if self.agents is None else read_roles(self.agents)

    @property
    def own_rewards(self) -> Sequence[str] | None:
        """Names of the rewards that episodes may bring themselves.

        None if the environment's class determines them later.
        """
        if self.roles is not None:
            return tuple(self.roles.trained)
        if self.agent is not None:
            return (OWN_REWARD,)
        return () if self.environment is None else None

    @property
    def may_isolate(self) -> bool:
        """True if the task works with worker.tool_isolation = "process".

        It does if it has no agent and no environment, and all its tools are functions.
        """
        return self.agent is None and self.environment is None and not any(map(is_tool, self.tools))

    def _checked_rewards(self) -> RewardFunctions:
        return RewardFunctions(self.rewards, self.reward_weights, own=self.own_rewards)

    def row_for(self, index: int, seed: int, shuffle: bool = True) -> Row:
        """Return the row of a ticket. It is the same on every worker.

        Args:
            index: Running index of the ticket.
            seed: Seed of the order.
            shuffle: True for a new order in each epoch.
        """
        return self.rows.row_for(index, seed, shuffle)

    def place_of(self, index: int, seed: int, shuffle: bool = True) -> RowPosition:
        """Return the epoch of a ticket and the position of its row in the data set. Args are those of `row_for`."""
        return self.rows.place_of(index, seed, shuffle)


def load_task(task_file: TaskSection) -> Task:
    """Load the task object that `task_file` names.

    Raises:
        ConfigError: The file does not define a `Task` of that name.
    """
    module = import_for(task_file.path, "task.path")
    if not hasattr(module, task_file.object_name):
        tasks = [name for name, value in vars(module).items() if isinstance(value, Task)]
        found = f"it has {', '.join(tasks)}" if tasks else "it has no Task"
        raise ConfigError(
            f"task.path = {task_file.path}: {task_file.file} defines no {task_file.object_name!r}, {found}; "
            f"define it there or name another object after the colon"
        )
    task = getattr(module, task_file.object_name)
    task = getattr(task, "task", task)  # A trainer made by slipstream.trl holds its task.
    if not isinstance(task, Task):
        raise ConfigError(
            f"task.path = {task_file.path}: {task_file.object_name} is a {type(task).__name__}, not a Task; "
            f"write {task_file.object_name} = slipstream.Task(dataset=..., rewards=[...])"
        )
    object.__setattr__(task, "folder", task_file.file.resolve().parent)
    return task
