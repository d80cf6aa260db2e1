"""Computes the rewards of a task over one group: side by side, retried where they fail, weighted and summed.

A reward is a function of the user's with TRL's signature, or a classifier on a pooling server.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from typing import Any

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import MAX_METRIC
from slipstream.rollout_worker import user_code
from slipstream.rollout_worker.data.columns import ENVIRONMENTS, missing_column
from slipstream.rollout_worker.task.reward_base import (
    OWN_REWARD,
    RESULTS,
    Notes,
    Reward,
    RewardBatch,
    RewardError,
    Score,
    TrainerState,
    Values,
)
from slipstream.rollout_worker.task.reward_classifier import ClassifierReward, how_to_serve
from slipstream.rollout_worker.user_code.values import as_number, encodable, type_name

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# Types that can be iterated, but hold no rewards in the order of the completions.
_NO_LISTS = (Mapping, Set, str, bytes, bytearray, memoryview)

DEFAULT_TIMEOUT_S = 120.0

# Kinds of `RewardError` that no other completions would mend.
NOT_NUMBERS, WRONG_NUMBER = "not numbers", "wrong number"


class FunctionReward:
    """A reward function `f(completions, prompts, completion_ids, **columns)`, sync or async. It also gets
    trainer_state, log_metric, log_extra and the inputs of the task's kind, if its signature takes them."""

    def __init__(self, function: Callable[..., Any], code: user_code.UserCode) -> None:
        self.name = name_of(function)
        self._function = function
        self._code = code
        self._takes = _parameters(function)

    def check_row(self, row: Mapping[str, Any], besides: Collection[str] = ()) -> None:
        """Raise `ConfigError` if it cannot be called with the columns of `row`."""
        arguments = self._arguments(RewardBatch(None, [], [], row), Notes(0))
        arguments |= {name: [] for name in besides if self._takes is None or name in self._takes}
        try:
            signature = inspect.signature(self._function)
        except (TypeError, ValueError):  # a builtin without a signature
            return
        for name, parameter in signature.parameters.items():
            if name in arguments or parameter.default is not parameter.empty or parameter.kind not in _BY_NAME:
                continue
            if name in ("prompt", "completion"):
                raise ConfigError(
                    f"Task(rewards=...): {self.name} takes {name!r}, and rewards get lists with one entry for each "
                    f"completion: name it {name}s"
                )
            raise missing_column(f"Task(rewards=...): {self.name}", name, row)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"Task(rewards=...): {self.name} cannot be called with {', '.join(arguments)} ({error}); write it as "
                f"def {self.name}(completions, **kwargs)"
            ) from None

    async def check_score(self, row: Mapping[str, Any], timeout_s: float) -> str | None:
        try:
            await self.values(RewardBatch.made_up(row, 2), timeout_s)
        except RewardError as error:
            if error.kind in (NOT_NUMBERS, WRONG_NUMBER):
                where = f" ({error.where})" if error.where else ""
                raise ConfigError(f"Task(rewards=...): {error}{where}") from None
            return None if error.kind == reasons.TIMEOUT else str(error)
        return None

    async def values(self, batch: RewardBatch, timeout_s: float) -> Values:
        """Call the function. Raises `RewardError`."""
        notes = Notes(len(batch.completions))
        plain = partial(_checked, self.name, self._function, batch.turns_each)
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
            values = notes.close()  # notes of a call that timed out do not count later
        values.rewards = rewards
        return values

    def _with_environments(self, batch: RewardBatch) -> Callable[..., Any]:
        """Bind the environments, if the function takes them: it gets the objects themselves, and copies of all else."""
        if ENVIRONMENTS not in batch.inputs or not (self._takes is None or ENVIRONMENTS in self._takes):
            return self._function
        return partial(self._function, **{ENVIRONMENTS: list(batch.inputs[ENVIRONMENTS])})

    def _arguments(self, batch: RewardBatch, notes: Notes) -> dict[str, Any]:
        on_request = {
            "trainer_state": batch.state,
            "log_metric": notes.log_metric,
            "log_extra": notes.log_extra,
            **{name: list(values) for name, values in batch.inputs.items() if name != ENVIRONMENTS},
        }
        asked = {name: value for name, value in on_request.items() if self._takes is None or name in self._takes}
        return {**batch.arguments(), **asked}


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, of a partial's function, or of an object's class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of a function's parameters; None for any, empty for a builtin without a signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


def _checked(
    name: str, function: Callable[..., Any], turns: Sequence[int], values: Any
) -> list[float | list[float] | None]:
    """Read what a function returned for completions with these numbers of turns. Raises `RewardError`."""
    size = len(turns)
    try:
        if issubclass(type(values), _NO_LISTS):
            raise TypeError(f"it is a {type_name(values)}")
        # Reading one value beyond the count shows that there are too many, even of values without end.
        given = [*islice(values, size + 1)]
        by_turn = any(isinstance(value, list | tuple) or (_is_array(value) and len(value) > 1) for value in given)
        rewards = [_number_or_turns(value, by_turn) for value in given]
    except (TypeError, ValueError) as error:
        text = f"{name} returned {values!r:.200}, which is not a list of numbers: {error}"
        raise RewardError(name, text, NOT_NUMBERS, user_code.defined_at(function)) from None
    if len(rewards) != size:
        number = f"{len(rewards)}" if len(rewards) < size else f"more than {size}"
        text = f"{name} returned {number} rewards for {size} completions; return one for each, in their order"
        raise RewardError(name, text, WRONG_NUMBER, user_code.defined_at(function))
    if len({type(reward) for reward in rewards if reward is not None}) > 1:
        at = next(number for number, reward in enumerate(rewards) if isinstance(reward, list))
        text = (
            f"{name} returned numbers, and for completion {at} a list; return one number for each completion, or for "
            f"each a list of one number per turn"
        )
        raise RewardError(name, text, "mixed", user_code.defined_at(function))
    for at, reward in enumerate(rewards):
        if isinstance(reward, list) and len(reward) != turns[at]:
            text = (
                f"{name} returned {len(reward)} numbers for completion {at}, which has {turns[at]} turns of the "
                f"policy; return one per turn, in their order, or one number for the whole"
            )
            raise RewardError(name, text, "wrong number of turns", user_code.defined_at(function))
        if reward is None:
            continue
        for turn, value in enumerate(reward if isinstance(reward, list) else [reward]):
            if not math.isfinite(value):
                where = f" at turn {turn} of completion {at}" if isinstance(reward, list) else ""
                text = f"{name} returned {value}{where}; a reward is a finite number, or None for no reward"
                raise RewardError(name, text, "not finite", user_code.defined_at(function))
    return rewards


def _is_array(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 1


def _number_or_turns(value: Any, by_turn: bool) -> float | list[float] | None:
    """Read the reward of a rollout: a number, None, or one number per turn. An array of one number is a number, unless
    others are `by_turn`."""
    if value is None:
        return None
    is_list = isinstance(value, list | tuple) or (by_turn and _is_array(value))
    return [as_number(number) for number in value] if is_list else as_number(value)


class RewardFunctions:
    """A task's rewards and their `weights`, by name.

    Args:
        rewards: Functions, and names of classifiers.
        weights: One per reward; None for 1 each.
        timeout_s: Seconds of one reward over one group, with all attempts but without waits for a thread.
        servers: URL of the pooling server of each classifier; None where none will be asked.
        attempts: Maximum number of attempts.
        max_steps: The run's, for `TrainerState`.
        own: Names of the rewards that rollouts bring with them, each weighted 1; None while they are not known.

    Raises:
        ConfigError: They do not fit together.
    """

    def __init__(
        self,
        rewards: Sequence[Callable[..., Any] | str],
        weights: Sequence[float] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        code: user_code.UserCode | None = None,
        servers: Mapping[str, str] | None = None,
        attempts: int = 1,
        max_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        own: Sequence[str] | None = (),
    ) -> None:
        _check_kinds(rewards)
        code = code or user_code.UserCode()
        self._rewards: list[Reward] = [
            ClassifierReward(reward, servers) if isinstance(reward, str) else FunctionReward(reward, code)
            for reward in rewards
        ]
        self.names = [_name(reward) for reward in self._rewards]
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"Task(rewards=...): the names {self.names} are not all different; rename one")
        numbers = [1.0] * len(rewards) if weights is None else [float(weight) for weight in weights]
        if len(numbers) != len(rewards) or not all(abs(weight) <= MAX_METRIC for weight in numbers):
            raise ConfigError(_wrong_weights(weights, len(rewards), own))
        self._own = list(own or ())
        self._has_environments = own is None
        self.weights = dict(zip(self.names, numbers, strict=True)) | dict.fromkeys(self._own, 1.0)
        self.max_steps = max_steps
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._clock = clock
        self._sleep = sleep

    def check_signatures(self, row: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a reward that cannot be computed from the columns of `row`."""
        besides = [ENVIRONMENTS] if self._has_environments else [RESULTS] if OWN_REWARD in self._own else []
        for reward in self._rewards:
            reward.check_row(row, besides)

    async def check_scores(self, row: Mapping[str, Any], timeout_s: float) -> list[str]:
        """Have each reward score made-up answers to `row`, side by side, as `Reward.check_score` does.

        Returns: Why answers got no score.

        Raises:
            ConfigError: A reward can give none.
        """
        found = await asyncio.gather(*(reward.check_score(row, timeout_s) for reward in self._rewards))
        return [text for text in found if text is not None]

    async def score(
        self, batch: RewardBatch, notify: Callable[[RewardError], None] = lambda error: None
    ) -> list[Score]:
        """Compute all rewards side by side.

        Args:
            notify: Called with a failure that is retried, and with notes that were left out.

        Returns: One score per rollout.

        Raises:
            RewardError: A reward failed at its last attempt.
        """
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(self._tried(reward, batch, notify)) for reward in self._rewards]
        scores, turns = [Score() for _ in batch.completions], batch.turns_each
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        for name, run in zip(self.names, runs, strict=True):
            outcome = run.result()
            if isinstance(outcome, RewardError):
                raise outcome
            for reason in outcome.left_out:
                notify(RewardError(name, f"{name}: {reason}", "note", None))
            for metric, noted in outcome.metrics.items():
                metrics[metric].append(noted)
            for number, (score, value) in enumerate(zip(scores, outcome.rewards, strict=True)):
                score.add(name, value, self.weights[name], turns[number])
                score.extra |= {column: texts[number] for column, texts in outcome.extra.items()}
        # An agent need not give a reward where functions do: a reward that no rollout brings is no component then.
        silent = bool(self.names) and not any(OWN_REWARD in own for own in batch.own)
        brought = [name for name in self._own if name != OWN_REWARD or not silent]
        for number, score in enumerate(scores):
            at_turns = dict(batch.at_turns[number]) if batch.at_turns else {}
            if taken := next((name for name in at_turns if name in self.names), None):
                text = f"slipstream.reward(..., {taken!r}) has the name of a reward function; choose another"
                raise RewardError(taken, text, "name", None)
            for name in brought:
                value = batch.own[number].get(name)
                given = at_turns.pop(name, None)
                score.add(
                    name, value if given is None else [*given[:-1], given[-1] + (value or 0.0)], 1.0, turns[number]
                )
            for name, given in at_turns.items():
                score.add(name, given, 1.0, turns[number])
            if score.reward is None and not self.weights:
                score.reward = 0.0  # a teacher alone teaches
            score.metrics = {metric: math.fsum(values) / len(values) for metric, values in metrics.items()}
        return scores

    async def _tried(
        self, reward: Reward, batch: RewardBatch, notify: Callable[[RewardError], None]
    ) -> Values | RewardError:
        """Compute one reward, with retries. Returns an error, because a TaskGroup would wrap it."""
        # Imported here, because it imports aiohttp, which a child process that runs a tool need not wait for.
        from slipstream.protocol.client import retry_pause_s

        left = self._timeout_s
        deadline = self._clock() + left
        attempt = 1
        while True:
            try:
                return await reward.values(batch, left)
            except RewardError as error:
                deadline += error.waited_s
                pause = retry_pause_s(attempt - 1)
                last = attempt >= self._attempts or self._clock() + pause >= deadline
                if last or not error.retryable:
                    return error
                notify(error)
            await self._sleep(pause)
            left = deadline - self._clock()
            attempt += 1


def _name(reward: Reward) -> str:
    """Return a reward's name. Raises `ConfigError` for a name that cannot be sent with a rollout."""
    name: object = reward.name
    if type(name) is not str or not name or encodable(name) != name:
        raise ConfigError(
            f"Task(rewards=...): the name {name!r:.200} of a reward is not text that UTF-8 can write; give the "
            f"function another __name__"
        )
    return name


def build_rewards(
    config: RunConfig,
    rewards: Sequence[Callable[..., Any] | str],
    weights: Sequence[float] | None,
    **options: Any,
) -> RewardFunctions:
    """Build a task's rewards with the settings of a run file. `options`: others of `RewardFunctions`. Raises
    `ConfigError`, also for a classifier without a server, and where nothing teaches."""
    has_none = not rewards and options.get("own", ()) == ()
    if has_none and not config.teacher.is_on:
        raise ConfigError(f"Task(rewards={rewards!r}): give a list of at least one reward function, or set teacher.url")
    if has_none and config.learner.keep_best:
        raise ConfigError(
            f"learner.keep_best = true with Task(rewards={rewards!r}): the best checkpoint is that of the highest "
            f"reward, and a teacher alone gives none; give a reward function, or leave learner.keep_best out"
        )
    if has_none and config.task.order == "learnable":
        raise ConfigError(
            f'task.order = "learnable" with Task(rewards={rewards!r}): rows are chosen by how their rewards differ, '
            f"and a teacher alone gives none; give a reward function, or leave task.order out"
        )
    return RewardFunctions(
        rewards,
        weights,
        config.worker.reward_timeout_s,
        servers=config.task.reward_servers,
        attempts=config.worker.reward_attempts,
        max_steps=config.learner.steps if config.learner.epochs is None else None,
        **options,
    )


def _wrong_weights(weights: Any, rewards: int, own: Sequence[str] | None) -> str:
    """Return the error text for `reward_weights` that do not fit. `own`: as in `RewardFunctions`."""
    giver = "an environment" if own is None else "the agent"
    fixed = "" if own == () else f"; the reward that {giver} gives itself has the weight 1 and none here"
    if not rewards:
        return f"Task(reward_weights={weights!r}): there are no reward functions to weigh{fixed}; leave it out"
    return (
        f"Task(reward_weights={weights!r}): give one number for each of the {rewards} rewards=[...], of at most "
        f"{MAX_METRIC:g}{fixed}"
    )


def _check_kinds(rewards: Any) -> None:
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise ConfigError(f"Task(rewards={rewards!r}): give a list of reward functions")
    for reward in rewards:
        if any(
            f"{kind.__module__}.{kind.__name__}" == "torch.nn.modules.module.Module" for kind in type(reward).__mro__
        ):
            raise ConfigError(
                f"Task(rewards=...): {type(reward).__name__} is a model, of which every worker would hold a copy; give "
                f"its name as text, and {how_to_serve('NAME')}"
            )
        if not callable(reward) and not (isinstance(reward, str) and reward):
            raise ConfigError(
                f"Task(rewards=...): {reward!r} is neither a function nor the name of a classifier; give a list of them"
            )


__all__ = ["RewardBatch", "RewardError", "RewardFunctions", "Score", "TrainerState", "build_rewards"]
