"""Checks and opens the environments of a task, with their tools, chat formats and pool, and finds the one of each row.

An environment is an object of the user's. Each episode has one of its own, which is reset and used again.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.protocol.config import ConfigError, RunConfig, checks
from slipstream.rollout_worker.chat.base import ChatFormat
from slipstream.rollout_worker.task.environment_instance import EnvironmentInterface, Instance, no_reset, tools_of
from slipstream.rollout_worker.task.environment_pool import Notify, Pool
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.user_code import UserCode, UserCodeError

if TYPE_CHECKING:
    from slipstream.rollout_worker.task.task import Task


# The column that names a row's environment where there are several, as in TRL.
COLUMN = "environment"

Factory = Callable[..., Any]


def factories_of(environment: Factory | Mapping[str, Factory]) -> dict[str | None, Factory]:
    """Return factories by name; the name of a single environment is None."""
    if isinstance(environment, Mapping):
        return dict(environment.items())
    return {None: environment}


def given_as(name: str | None) -> str:
    """Return how the task gives the environment of this name."""
    return "Task(environment=...)" if name is None else f"Task(environment={{{name!r}: ...}})"


def check_environment(environment: Any, rewards: Sequence[Any]) -> None:
    """Raise `ConfigError` for a value that is no environment, and for classes without `get_reward` where no reward
    functions are given."""
    several = isinstance(environment, Mapping)
    if not (callable(environment) or (several and environment)):
        raise ConfigError(
            f"Task(environment={environment!r:.80}): give a class, or a function that gives an instance, or a dict of "
            f"them by name"
        )
    for name, factory in factories_of(environment).items():
        if several and not (isinstance(name, str) and name):
            raise ConfigError(f"Task(environment={{{name!r:.80}: ...}}): name each environment by a text")
        if not callable(factory):
            raise ConfigError(
                f"{given_as(name)} is a {type(factory).__name__}, which every episode would share; give its class, or "
                f"a function that makes one"
            )
        if inspect.isclass(factory) and not callable(getattr(factory, "reset", None)):
            raise no_reset(given_as(name), factory.__name__)
    factories = factories_of(environment).values()
    if not rewards and all(inspect.isclass(each) and not hasattr(each, "get_reward") for each in factories):
        raise no_reward(each.__name__ for each in factories)


def no_reward(classes: Iterable[str]) -> ConfigError:
    """Return the error for environments of these classes where nothing gives a reward."""
    return ConfigError(
        f"Task(environment=...): nothing gives a reward: write a method get_reward(self) of "
        f"{', '.join(dict.fromkeys(classes))}, which returns a number, or give Task(rewards=[...])"
    )


def check_row(environment: Factory | Mapping[Any, Any], columns: Mapping[str, Any]) -> str | None:
    """Return the fault of a row's choice of environment; None if there is none. `environment`: as in the task, or
    any mapping with the names of several."""
    if not isinstance(environment, Mapping):
        return None
    known = ", ".join(map(str, environment))
    if COLUMN not in columns:
        return f"it has no column {COLUMN!r}, which names its environment, one of: {known}"
    if not isinstance(columns[COLUMN], str) or columns[COLUMN] not in environment:
        return f"its column {COLUMN!r} is {columns[COLUMN]!r:.80}, which is not one of the environments: {known}"
    return None


# Builds a chat format for schemas; the second argument says whether users' messages follow turns.
MakeChat = Callable[[Sequence[dict[str, Any]], bool], ChatFormat]


@dataclass(frozen=True, slots=True)
class EnvironmentKind:
    """Shared by the episodes of one environment. `name`: its name in the task; None where it is the only one."""

    name: str | None
    interface: EnvironmentInterface
    tools: ToolBox
    chat: ChatFormat


@dataclass(frozen=True, slots=True)
class Environments:
    """The open environments of a task. `kinds`: by name, which is None for the only one."""

    kinds: Mapping[str | None, EnvironmentKind]
    pool: Pool

    def kind_of(self, columns: Mapping[str, Any]) -> EnvironmentKind:
        """Return the environment of a row. Raises `ConfigError` where the row names none."""
        if None in self.kinds:
            return self.kinds[None]
        if fault := check_row(self.kinds, columns):
            raise ConfigError(fault)
        return self.kinds[columns[COLUMN]]

    def reset_columns(self, kind: EnvironmentKind, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that `reset` gets: as in TRL all that it takes, without the environment's name.
        Raises `ConfigError`."""
        return kind.interface.reset_arguments(
            {name: value for name, value in columns.items() if kind.name is None or name != COLUMN}
        )

    @property
    def rewards(self) -> list[str]:
        """Names of the environments' rewards: each class with `get_reward`, as in TRL."""
        return list(dict.fromkeys(kind.interface.cls for kind in self.kinds.values() if kind.interface.rewards))

    @property
    def chat(self) -> ChatFormat:
        return next(iter(self.kinds.values())).chat

    @property
    def described(self) -> list[dict[str, Any]]:
        """Description of the environments for the fingerprint."""
        return [
            {
                "environment": name,
                "class": kind.interface.cls,
                "responds": kind.interface.responds,
                "tools": kind.tools.schemas,
            }
            for name, kind in self.kinds.items()
        ]


@asynccontextmanager
async def open_environments(
    config: RunConfig, task: Task, tools: ToolBox, code: UserCode, make_chat: MakeChat, notify: Notify
) -> AsyncIterator[Environments]:
    """Open the environments of a task, which has some, next to its other `tools`.

    One instance of each is made at once, to see what it can do. All instances are closed at the end.

    Raises:
        ConfigError: An environment cannot be made or described, or goes with no setting of the run file.
    """
    assert task.environment is not None
    if config.worker.tool_isolation == "process":
        raise ConfigError(
            "worker.tool_isolation = process: an environment keeps its state from call to call, and cannot be called "
            "in another process; set worker.tool_isolation = thread, and let the environment start untrusted code as "
            "a process"
        )
    try:
        checks.check_patience(config.queue, config.worker, config.learner, environments=True)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pool = Pool(factories_of(task.environment), code, config.worker.environment_timeout_s, config.max_open, notify)
    try:
        kinds = {name: await _kind(name, pool, tools, make_chat) for name in pool.factories}
        environments = Environments(kinds, pool)
        if not (task.rewards or environments.rewards):
            raise no_reward(kind.interface.cls for kind in kinds.values())
        if both := set(environments.rewards).intersection(map(_name, task.rewards)):
            raise ConfigError(
                f"Task(rewards=...): {min(both)!r} is a reward function and the class of an environment with "
                f"get_reward; rename one"
            )
        yield environments
    finally:
        await pool.close()


async def _kind(name: str | None, pool: Pool, tools: ToolBox, make_chat: MakeChat) -> EnvironmentKind:
    try:
        instance = await pool.take(name)
    except UserCodeError as error:
        place = f" ({error.where})" if error.where else ""
        raise ConfigError(f"{given_as(name)}: no instance can be made: {error}{place}; fix it there") from None
    try:
        box = tools.and_tools(tools_of(instance.interface, instance.object))
        return EnvironmentKind(name, instance.interface, box, make_chat(box.schemas, instance.interface.responds))
    finally:
        pool.give_back(instance)


def _name(reward: Any) -> str:
    return reward if isinstance(reward, str) else getattr(reward, "__name__", "")


__all__ = ["EnvironmentKind", "Environments", "Instance", "open_environments"]
