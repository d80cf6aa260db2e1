"""Reward functions with TRL's signature, over the rollouts of one group."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from protocol.config import ConfigError
from rollout_worker import user_code

DEFAULT_TIMEOUT_S = 120.0


class RewardError(user_code.UserCodeError):
    """A reward function failed, or did not return a list of rewards; the text names it, and so does `function`."""

    def __init__(self, function: str, text: str, kind: str, where: str | None) -> None:
        super().__init__(text, kind, where)
        self.function = function


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """What rewards are computed from; `completions` and `completion_ids` have one entry per rollout.

    A completion is a list of messages where the prompt is one, else text; its ids are all that followed the
    prompt, tool messages included. `columns` are those of the group's row.
    """

    prompt: Any
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: Mapping[str, Any]

    def arguments(self) -> dict[str, Any]:
        size = len(self.completions)
        columns = {name: [value] * size for name, value in self.columns.items() if name != "prompt"}
        return {
            "prompts": [self.prompt] * size,
            "completions": self.completions,
            "completion_ids": self.completion_ids,
            **columns,
        }


@dataclass(slots=True)
class Score:
    """A rollout's reward: the weighted sum of the components that are not None; None if all are."""

    components: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None


class RewardFunctions:
    """A task's reward functions and their weights. Raises `ConfigError` if they do not fit together."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        code: user_code.UserCode | None = None,
    ) -> None:
        self._code = code or user_code.UserCode()
        if not isinstance(functions, Sequence) or not functions or not all(callable(f) for f in functions):
            raise ConfigError(f"Task(rewards={functions!r}): give a list of at least one reward function")
        self.names = [getattr(function, "__name__", type(function).__name__) for function in functions]
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"Task(rewards=...): the names {self.names} are not all different; rename one")
        self._weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        if len(self._weights) != len(functions) or not all(math.isfinite(weight) for weight in self._weights):
            raise ConfigError(
                f"Task(reward_weights={weights!r}): give one finite number for each of the {len(functions)} rewards"
            )
        self._functions = list(functions)
        self._timeout_s = timeout_s

    def check_signatures(self, row: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for a function that cannot be called with the columns of `row`."""
        arguments = RewardBatch(None, [], [], row).arguments()
        for name, function in zip(self.names, self._functions, strict=True):
            try:
                inspect.signature(function).bind(**arguments)
            except TypeError as error:
                raise ConfigError(
                    f"Task(rewards=...): {name} cannot be called with {', '.join(arguments)} ({error}); write it as "
                    f"def {name}(completions, **kwargs)"
                ) from None
            except ValueError:  # a builtin without a signature
                continue

    async def score(self, batch: RewardBatch) -> list[Score]:
        """One score per rollout; the functions run side by side. Raises `RewardError`."""
        arguments = batch.arguments()
        async with asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(self._call(name, function, arguments))
                for name, function in zip(self.names, self._functions, strict=True)
            ]
        scores = [Score() for _ in batch.completions]
        for name, weight, run in zip(self.names, self._weights, runs, strict=True):
            outcome = run.result()
            if isinstance(outcome, RewardError):
                raise outcome
            for score, value in zip(scores, outcome, strict=True):
                score.components[name] = value
                if value is not None:
                    score.reward = (score.reward or 0.0) + weight * value
        return scores

    async def _call(
        self, name: str, function: Callable[..., Any], arguments: dict[str, Any]
    ) -> list[float | None] | RewardError:
        """An error is returned, not raised, so that it leaves the TaskGroup as itself."""
        plain = partial(_checked, name, function, len(arguments["completions"]))
        try:
            return await self._code.call(function, plain, self._timeout_s, **arguments)  # type: ignore[no-any-return]
        except RewardError as error:
            return error
        except user_code.UserCodeError as error:
            return RewardError(name, f"{name}: {error}", error.kind, error.where)


def _checked(name: str, function: Callable[..., Any], size: int, values: Any) -> list[float | None]:
    try:
        rewards = [None if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        text = f"{name} returned {values!r:.200}, which is not a list of numbers: {error}"
        raise RewardError(name, text, "not numbers", user_code.defined_at(function)) from None
    if len(rewards) != size:
        text = f"{name} returned {len(rewards)} rewards for {size} completions; return one for each, in their order"
        raise RewardError(name, text, "wrong number", user_code.defined_at(function))
    if bad := [reward for reward in rewards if reward is not None and not math.isfinite(reward)]:
        text = f"{name} returned {bad[0]}; a reward is a finite number, or None for no reward"
        raise RewardError(name, text, "not finite", user_code.defined_at(function))
    return rewards
