"""Which environment a task's row is played in: what `Task(environment=...)` may be, and what its rows must have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from protocol.config import ConfigError
from rollout_worker.data.rows import Row, RowPosition, Rows
from rollout_worker.task.environment.face import no_reset
from rollout_worker.task.environment_instance import EMPTY_PROMPT

# The column that names a row's environment, where there are several; TRL's.
COLUMN = "environment"

Factory = Callable[..., Any]


def factories_of(environment: Factory | Mapping[str, Factory]) -> dict[str | None, Factory]:
    """By name; of one without names the name is None."""
    if isinstance(environment, Mapping):
        return dict(environment.items())
    return {None: environment}


def given_as(name: str | None) -> str:
    """How the task names it."""
    return "Task(environment=...)" if name is None else f"Task(environment={{{name!r}: ...}})"


def check(environment: Any, rewards: Sequence[Any]) -> None:
    """Raises `ConfigError` for what is no environment, and where classes alone are given, of which none can give a
    reward, and nothing else does."""
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
    """Nothing rewards the episodes in environments of these classes."""
    return ConfigError(
        f"Task(environment=...): nothing gives a reward: write a method get_reward(self) of "
        f"{', '.join(dict.fromkeys(classes))}, which returns a number, or give Task(rewards=[...])"
    )


def check_row(environment: Factory | Mapping[Any, Any], columns: Mapping[str, Any]) -> str | None:
    """What is wrong with a row's choice of environment, in words; None if nothing is. `environment`: as the task has
    it, or anything else by the names of several."""
    if not isinstance(environment, Mapping):
        return None
    known = ", ".join(map(str, environment))
    if COLUMN not in columns:
        return f"it has no column {COLUMN!r}, which names its environment, one of: {known}"
    if not isinstance(columns[COLUMN], str) or columns[COLUMN] not in environment:
        return f"its column {COLUMN!r} is {columns[COLUMN]!r:.80}, which is not one of the environments: {known}"
    return None


class WithPrompts:
    """Rows, of which those without a prompt have an empty one: the environment's reset says what there is to do."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def size(self) -> int | None:
        return self._rows.size

    def place_of(self, index: int, seed: int, shuffle: bool) -> RowPosition:
        return self._rows.place_of(index, seed, shuffle)

    def row_for(self, index: int, seed: int, shuffle: bool) -> Row:
        row = self._rows.row_for(index, seed, shuffle)
        return row._replace(columns=_with_prompt(row.columns))

    def sample(self, most: int) -> Iterator[tuple[int, Any]]:
        for number, columns in self._rows.sample(most):
            yield number, _with_prompt(columns)


def _with_prompt(columns: Any) -> Any:
    if not isinstance(columns, Mapping) or "prompt" in columns:
        return columns
    return {"prompt": [dict(message) for message in EMPTY_PROMPT], **columns}
