"""All environments of a task, for as long as they are needed: what each can do, its tools and chat format, its pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protocol.config import ConfigError, RunConfig, checks
from rollout_worker.chat.base import ChatFormat
from rollout_worker.task.environment.choice import COLUMN, check_row, factories_of, given_as, no_reward
from rollout_worker.task.environment.face import Face, tools_of
from rollout_worker.task.environment_pool import Pool
from rollout_worker.tools.toolbox import ToolBox
from rollout_worker.user_code import UserCode, UserCodeError

if TYPE_CHECKING:
    from rollout_worker.task.task import Task

# Of tools with these schemas; the second says whether messages of the user's follow turns.
MakeChat = Callable[[Sequence[dict[str, Any]], bool], ChatFormat]


@dataclass(frozen=True, slots=True)
class Stage:
    """What the episodes of one environment have in common. name: its factory's, None where there is but one."""

    name: str | None
    face: Face
    tools: ToolBox
    chat: ChatFormat


@dataclass(frozen=True, slots=True)
class Environments:
    """The task's environments, open. stages: by name, None where there is but one."""

    stages: Mapping[str | None, Stage]
    pool: Pool

    def stage_of(self, columns: Mapping[str, Any]) -> Stage:
        """That of a row. Raises `ConfigError` where it names none."""
        if None in self.stages:
            return self.stages[None]
        if fault := check_row(self.stages, columns):
            raise ConfigError(fault)
        return self.stages[columns[COLUMN]]

    def reset_columns(self, stage: Stage, columns: Mapping[str, Any]) -> dict[str, Any]:
        """What of a row's columns `reset` gets: as in TRL all that it takes, without the name that chose it. Raises
        `ConfigError`."""
        return stage.face.reset_arguments(
            {name: value for name, value in columns.items() if stage.name is None or name != COLUMN}
        )

    @property
    def rewards(self) -> list[str]:
        """The rewards that environments give, one for each class that has `get_reward`, named after it as in TRL."""
        return list(dict.fromkeys(stage.face.cls for stage in self.stages.values() if stage.face.rewards))

    @property
    def chat(self) -> ChatFormat:
        return next(iter(self.stages.values())).chat

    @property
    def described(self) -> list[dict[str, Any]]:
        """What the fingerprint is taken of."""
        return [
            {
                "environment": name,
                "class": stage.face.cls,
                "responds": stage.face.responds,
                "tools": stage.tools.schemas,
            }
            for name, stage in self.stages.items()
        ]


@asynccontextmanager
async def open_environments(
    config: RunConfig, task: Task, tools: ToolBox, code: UserCode, make_chat: MakeChat
) -> AsyncIterator[Environments | None]:
    """The environments of `task` beside its other `tools`, None if it has none; one instance of each is made at once,
    to see what it can do, and all are closed at the end. Raises `ConfigError`."""
    if task.environment is None:
        yield None
        return
    if config.worker.tool_isolation == "process":
        raise ConfigError(
            "worker.tool_isolation = process: an environment keeps its state from call to call, and cannot be called "
            "in another process; set thread, and start what must not be trusted as a process from the environment"
        )
    try:
        checks.check_patience(config.queue, config.worker, config.learner, environments=True)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pool = Pool(factories_of(task.environment), code, config.worker.environment_timeout_s)
    try:
        stages = {name: await _stage(name, pool, tools, make_chat) for name in pool.factories}
        environments = Environments(stages, pool)
        if not (task.rewards or environments.rewards):
            raise no_reward(stage.face.cls for stage in stages.values())
        if both := set(environments.rewards).intersection(map(_name, task.rewards)):
            raise ConfigError(
                f"Task(rewards=...): {min(both)!r} is a reward function and the class of an environment with "
                f"get_reward; rename one"
            )
        yield environments
    finally:
        await pool.close()


async def _stage(name: str | None, pool: Pool, tools: ToolBox, make_chat: MakeChat) -> Stage:
    try:
        instance = await pool.take(name)
    except UserCodeError as error:
        place = f" ({error.where})" if error.where else ""
        raise ConfigError(f"{given_as(name)}: no instance can be made: {error}{place}; mend it there") from None
    try:
        box = tools.and_tools(tools_of(instance.face, instance.object))
        return Stage(name, instance.face, box, make_chat(box.schemas, instance.face.responds))
    finally:
        pool.give_back(instance)


def _name(reward: Any) -> str:
    return reward if isinstance(reward, str) else getattr(reward, "__name__", "")
