"""What is checked of a task's environments before a run starts: every row names one, and a few resets work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from deploy.prompt_check import Opened, Source
from protocol.config import ConfigError, RunConfig
from rollout_worker.chat.base import PromptError
from rollout_worker.task.environment_instance import folded, observed
from rollout_worker.task.environments import EnvironmentKind, Environments, check_row
from rollout_worker.task.task import Task
from rollout_worker.user_code import UserCodeError

# Rows whose choice of environment is looked at, and resets of each environment that are tried.
_ROWS = 1000
_RESETS = 3


async def look(config: RunConfig, task: Task, source: Source, environments: Environments) -> Opened:
    """What a few resets with rows of `source` gave. Raises `ConfigError` for a row that no environment can be found
    for, and where all resets of one fail."""
    assert task.environment is not None
    rows = [(number, columns) for number, columns in source.sample(_ROWS) if isinstance(columns, Mapping)]
    tried: dict[str | None, list[tuple[int, Mapping[str, Any]]]] = {name: [] for name in environments.stages}
    for number, columns in rows:
        if fault := check_row(task.environment, columns):
            raise ConfigError(f"Task(environment={{...}}): row {number} cannot be played: {fault}")
        tried[environments.stage_of(columns).name].append((number, columns))
    lengths: list[int] = []
    faults: list[str] = []
    for name, stage in environments.stages.items():
        few = tried[name][:_RESETS]
        if not few and not source.evaluated:
            faults.append(f"no row that was looked at names the environment {name!r}: it is not used")
        outcomes = await asyncio.gather(*(_reset(config, source, environments, stage, *row) for row in few))
        failed = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if few and len(failed) == len(few):
            remedy = "mend it there, or raise worker.environment_timeout_s"
            raise ConfigError(f"Task(environment=...): {failed[0]}; {remedy}")
        faults += failed
        lengths += [outcome for outcome in outcomes if isinstance(outcome, int)]
    return Opened(lambda row: environments.stage_of(row).chat, lengths, faults)


async def _reset(
    config: RunConfig,
    source: Source,
    environments: Environments,
    stage: EnvironmentKind,
    number: int,
    columns: Mapping[str, Any],
) -> int | str:
    """The tokens of the prompt that it gives, or what went wrong."""
    arguments = environments.reset_columns(stage, columns)
    try:
        instance = await environments.pool.take(stage.name)
    except UserCodeError as error:
        return f"no instance of {stage.face.cls} can be made: {error}{_at(error)}"
    try:
        said = await instance.call("reset", observed, config.worker.environment_timeout_s, arguments)
        return len(await stage.chat.prompt_ids(folded(columns["prompt"], said)))
    except UserCodeError as error:
        instance.lost = True
        return f"{stage.face.cls}.reset fails on row {number}{source.whose}: {error}{_at(error)}"
    except PromptError as error:
        return f"what {stage.face.cls}.reset gives on row {number}{source.whose} cannot be rendered: {error}"
    finally:
        environments.pool.give_back(instance)


def _at(error: UserCodeError) -> str:
    return f" ({error.where})" if error.where else ""
