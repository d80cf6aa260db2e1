"""A reward that a function of the user's computes, with TRL's signature."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Set
from functools import partial
from itertools import islice
from typing import Any

from protocol import reasons
from protocol.config import ConfigError
from protocol.config.text import nearest
from rollout_worker import user_code
from rollout_worker.task.rewards.base import ENVIRONMENTS, RESULTS, RewardBatch, RewardError, Values
from rollout_worker.task.rewards.notes import Notes
from rollout_worker.user_code.texts import type_name

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Python iterates over them, but not over rewards in the order of the completions.
_NO_LISTS = (Mapping, Set, str, bytes, bytearray, memoryview)


class FunctionReward:
    """`f(completions, prompts, completion_ids, **columns)`, sync or async. Of trainer_state, log_metric, log_extra and,
    where the task has agents, agent_results it gets those that its signature takes."""

    def __init__(self, function: Callable[..., Any], code: user_code.UserCode) -> None:
        self.name = name_of(function)
        self._function = function
        self._code = code
        self._takes = _parameters(function)

    def check(self, row: Mapping[str, Any], besides: Collection[str] = ()) -> None:
        """Raises `ConfigError` if it cannot be called with the columns of `row`."""
        arguments = self._arguments(RewardBatch(None, [], [], row), Notes(0))
        arguments |= {name: [] for name in besides if self._takes is None or name in self._takes}
        try:
            signature = inspect.signature(self._function)
        except (TypeError, ValueError):  # a builtin without a signature
            return
        self._check_columns(signature, arguments, row)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"Task(rewards=...): {self.name} cannot be called with {', '.join(arguments)} ({error}); write it as "
                f"def {self.name}(completions, **kwargs)"
            ) from None

    def _check_columns(self, signature: inspect.Signature, given: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        for name, parameter in signature.parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind in _BY_NAME
            if needed and name not in given:
                columns = [str(column) for column in row]
                close = nearest(name, columns)
                meant = f"did you mean {close}? " if close else ""
                raise ConfigError(
                    f"Task(rewards=...): {self.name} takes {name!r}, which is not a column of the data set; {meant}"
                    f"the columns are: {', '.join(columns)}"
                )

    async def values(self, batch: RewardBatch, timeout_s: float) -> Values:
        """Raises `RewardError`."""
        notes = Notes(len(batch.completions))
        plain = partial(_checked, self.name, self._function, len(batch.completions))
        try:
            rewards = await self._code.call(
                self._with_environments(batch), plain, timeout_s, user_code.Kind.REWARD, **self._arguments(batch, notes)
            )
        except RewardError:
            raise
        except user_code.UserCodeError as error:
            retryable = error.kind != reasons.TIMEOUT
            failure = RewardError(self.name, f"{self.name}: {error}", error.kind, error.where, retryable)
            failure.waited_s = error.waited_s
            raise failure from error
        finally:
            values = notes.close()  # what comes later, from a call that was given up, does not count
        values.rewards = rewards
        return values

    def _with_environments(self, batch: RewardBatch) -> Callable[..., Any]:
        """The function, with the environments if it takes them: the objects themselves, where all else is copied."""
        if batch.environments is None or not (self._takes is None or ENVIRONMENTS in self._takes):
            return self._function
        return partial(self._function, **{ENVIRONMENTS: batch.environments})

    def _arguments(self, batch: RewardBatch, notes: Notes) -> dict[str, Any]:
        on_request = {
            "trainer_state": batch.state,
            "log_metric": notes.log_metric,
            "log_extra": notes.log_extra,
            **({} if batch.results is None else {RESULTS: list(batch.results)}),
        }
        asked = {name: value for name, value in on_request.items() if self._takes is None or name in self._takes}
        return {**batch.arguments(), **asked}


def name_of(function: Callable[..., Any]) -> str:
    """A function's name, a partial's being that of its function; an object's is that of its class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names that a function takes; None for any, empty of a builtin that does not tell."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


def _checked(name: str, function: Callable[..., Any], size: int, values: Any) -> list[float | None]:
    try:
        if issubclass(type(values), _NO_LISTS):
            raise TypeError(f"it is a {type_name(values)}")
        # One too many is enough to see that it is too many, of values without end too.
        rewards = [None if value is None else float(value) for value in islice(values, size + 1)]
    except (TypeError, ValueError) as error:
        text = f"{name} returned {values!r:.200}, which is not a list of numbers: {error}"
        raise RewardError(name, text, "not numbers", user_code.defined_at(function)) from None
    if len(rewards) != size:
        number = f"{len(rewards)}" if len(rewards) < size else f"more than {size}"
        text = f"{name} returned {number} rewards for {size} completions; return one for each, in their order"
        raise RewardError(name, text, "wrong number", user_code.defined_at(function))
    if bad := [reward for reward in rewards if reward is not None and not math.isfinite(reward)]:
        text = f"{name} returned {bad[0]}; a reward is a finite number, or None for no reward"
        raise RewardError(name, text, "not finite", user_code.defined_at(function))
    return rewards
