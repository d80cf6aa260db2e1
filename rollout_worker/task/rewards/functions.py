"""All rewards of a task over one group: side by side, tried again where they fail, weighted and summed."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from protocol.config import ConfigError, RunConfig
from protocol.messages import LARGEST_FIGURE
from rollout_worker import user_code
from rollout_worker.backoff import pause_s
from rollout_worker.task.rewards.base import (
    ENVIRONMENTS,
    OWN_REWARD,
    RESULTS,
    Reward,
    RewardBatch,
    RewardError,
    Score,
    Values,
)
from rollout_worker.task.rewards.classifier import ClassifierReward, how_to_serve
from rollout_worker.task.rewards.function import FunctionReward
from rollout_worker.user_code.texts import encodable

DEFAULT_TIMEOUT_S = 120.0


class RewardFunctions:
    """A task's rewards and their `weights`, by name. Raises `ConfigError` if they do not fit together.

    rewards: functions, and names of classifiers; servers: URL of the pooling server of each classifier, None where none
    will be asked; own: names of the rewards that rollouts bring with them, each weighted 1, None while they are not
    known; timeout_s: of one reward over one group, all its tries included, without their waits for a thread; attempts:
    the most tries; max_steps: the run's, for `TrainerState`.
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
        if rewards or own == ():
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
        if len(numbers) != len(rewards) or not all(abs(weight) <= LARGEST_FIGURE for weight in numbers):
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
        """Raises `ConfigError` for a reward that cannot be computed from the columns of `row`."""
        besides = [ENVIRONMENTS] if self._has_environments else [RESULTS] if OWN_REWARD in self._own else []
        for reward in self._rewards:
            reward.check(row, besides)

    async def score(self, batch: RewardBatch, told: Callable[[RewardError], None] = lambda error: None) -> list[Score]:
        """One score per rollout; the rewards run side by side. `told`: of a failure that is tried again, and of notes
        that were left out. Raises `RewardError`."""
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(self._tried(reward, batch, told)) for reward in self._rewards]
        scores = [Score() for _ in batch.completions]
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        for name, run in zip(self.names, runs, strict=True):
            outcome = run.result()
            if isinstance(outcome, RewardError):
                raise outcome
            for reason in outcome.left_out:
                told(RewardError(name, f"{name}: {reason}", "note", None))
            for metric, figure in outcome.metrics.items():
                metrics[metric].append(figure)
            for number, (score, value) in enumerate(zip(scores, outcome.rewards, strict=True)):
                score.components[name] = value
                score.extra |= {column: texts[number] for column, texts in outcome.extra.items()}
        # Where functions judge, an agent need not: what no rollout brought is no component then.
        silent = bool(self.names) and not any(OWN_REWARD in own for own in batch.own)
        brought = [name for name in self._own if name != OWN_REWARD or not silent]
        for number, score in enumerate(scores):
            score.components |= {name: batch.own[number].get(name) for name in brought}
            for name, value in score.components.items():
                if value is not None:
                    score.reward = (score.reward or 0.0) + self.weights[name] * value
            score.metrics = {metric: math.fsum(figures) / len(figures) for metric, figures in metrics.items()}
        return scores

    async def _tried(
        self, reward: Reward, batch: RewardBatch, told: Callable[[RewardError], None]
    ) -> Values | RewardError:
        """An error is returned, not raised, so that it leaves the TaskGroup as itself."""
        left = self._timeout_s
        deadline = self._clock() + left
        attempt = 1
        while True:
            try:
                return await reward.values(batch, left)
            except RewardError as error:
                deadline += error.waited_s
                pause = pause_s(attempt - 1)
                last = attempt >= self._attempts or self._clock() + pause >= deadline
                if last or not error.retryable:
                    return error
                told(error)
            await self._sleep(pause)
            left = deadline - self._clock()
            attempt += 1


def _name(reward: Reward) -> str:
    """Raises `ConfigError` for a name that cannot be sent with a rollout."""
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
    code: user_code.UserCode | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    own: Sequence[str] | None = (),
) -> RewardFunctions:
    """A task's rewards under a run file; `own`: as `RewardFunctions` has it. Raises `ConfigError`, also for a
    classifier without a server."""
    return RewardFunctions(
        rewards,
        weights,
        config.worker.reward_timeout_s,
        code,
        servers=config.task.reward_servers,
        attempts=config.worker.reward_attempts,
        max_steps=config.learner.steps if config.learner.epochs is None else None,
        clock=clock,
        sleep=sleep,
        own=own,
    )


def _wrong_weights(weights: Any, rewards: int, own: Sequence[str] | None) -> str:
    """`own`: as of `RewardFunctions`."""
    whose = "an environment" if own is None else "the agent"
    fixed = "" if own == () else f"; the reward that {whose} gives itself has the weight 1 and none here"
    if not rewards:
        return f"Task(reward_weights={weights!r}): there are no reward functions to weigh{fixed}; leave it out"
    return (
        f"Task(reward_weights={weights!r}): give one number for each of the {rewards} rewards=[...], of at most "
        f"{LARGEST_FIGURE:g}{fixed}"
    )


def _check_kinds(rewards: Any) -> None:
    if isinstance(rewards, str) or not isinstance(rewards, Sequence) or not rewards:
        raise ConfigError(f"Task(rewards={rewards!r}): give a list of at least one reward function")
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
