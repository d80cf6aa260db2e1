"""Episodes that are each played in an environment of their own, which may add to the row's prompt, answer the policy's
turns and reward it.

Every episode goes its own way: it waits for no other's reset, answer or reward, and holds no slot meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from protocol import reasons, rollouts
from protocol.config import ConfigError, WorkerSection
from rollout_worker.backoff import pause_s
from rollout_worker.chat.parsers.base import Message
from rollout_worker.episodes.capacity import Place
from rollout_worker.episodes.episode import Episode, EpisodeSetup
from rollout_worker.episodes.runner import EpisodeRunner
from rollout_worker.episodes.source import GroupPlan, TicketFailed, prompt_ids, side_by_side
from rollout_worker.episodes.tool_results import for_policy, told_of_defused
from rollout_worker.inference.failures import EpisodeFailed, FailureNotices
from rollout_worker.inference.router import Affinity
from rollout_worker.task.environment_instance import Instance, answered, folded, observed, rewarded
from rollout_worker.task.environments import EnvironmentKind, Environments
from rollout_worker.tools.base import ToolResult
from rollout_worker.user_code import NotCalled, UserCodeError


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """See `base.Driver`. limits: the workers' time-outs and tries; counted: failures by reason."""

    environments: Environments
    episodes: EpisodeRunner
    troubles: FailureNotices
    counted: Counter[str]
    limits: WorkerSection
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def open(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        try:
            stage = self.environments.stage_of(plan.row.columns)
            columns = self.environments.reset_columns(stage, plan.row.columns)
        except ConfigError as error:
            detail = f"row {plan.row.number} cannot be played: {error}"
            self.troubles.add("row", reasons.ENVIRONMENT, detail)
            raise TicketFailed(reasons.ROW, detail, retryable=False) from None
        return await side_by_side(plan, partial(self._episode, plan, stage, columns))

    async def _episode(
        self, plan: GroupPlan, stage: EnvironmentKind, columns: Mapping[str, Any], affinity: Affinity
    ) -> Episode:
        """One episode, whose environment is kept until the group is rewarded. Raises `EpisodeFailed`."""
        pool = self.environments.pool
        try:
            instance = await pool.take(stage.name)
        except UserCodeError as error:
            raise _failed(reasons.ENVIRONMENT, stage, "no instance can be made", error) from None
        play = _Play(self, stage, instance)
        try:
            prompt = await play.reset(plan.row.columns["prompt"], columns)
            try:
                most = self.episodes.limits.max_model_len
                ids = await prompt_ids(stage.chat, prompt, plan.row, most, self.troubles)
            except TicketFailed as failure:
                raise EpisodeFailed(failure.reason, str(failure), failure.retryable) from None
            respond = play.respond if stage.face.responds else None
            scene = EpisodeSetup(prompt, ids, stage.chat, instance.tools(stage.tools), respond, plan.own)
            episode = await self.episodes.run(scene, affinity)
            if stage.face.rewards:
                episode.rewards[stage.face.cls] = await play.reward()
        except BaseException:
            pool.give_back(instance)
            raise
        episode.environment = instance
        episode.rollout.metrics |= play.seconds
        plan.after.callback(pool.give_back, instance)
        return episode


@dataclass(slots=True)
class _Play:
    """One episode's dealings with its environment. seconds: what they took, under the names of metrics."""

    driver: EnvironmentSource
    stage: EnvironmentKind
    instance: Instance
    prompt: list[Message] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    async def reset(self, prompt: Sequence[Message], columns: Mapping[str, Any]) -> list[Message]:
        """The episode's prompt. Raises `EpisodeFailed`."""
        timeout_s = self.driver.limits.environment_timeout_s
        with self._at_work("tools", rollouts.ENV_RESET_S, reasons.ENVIRONMENT, "reset fails"):
            said = await self.instance.call("reset", observed, timeout_s, dict(columns))
        self.prompt = folded(prompt, said)
        return self.prompt

    async def respond(self, messages: Sequence[Message]) -> list[Message] | None:
        """See `scene.Respond`."""
        conversation = {"messages": [*self.prompt, *messages]}
        with self._at_work("tools", rollouts.ENV_RESPOND_S, reasons.ENVIRONMENT, "respond fails"):
            said = await self.instance.call("respond", answered, self.driver.limits.tool_timeout_s, conversation)
        if said is None:
            return None
        return [{**message, "content": await self._for_policy(message["content"])} for message in said]

    async def reward(self) -> float | None:
        """What `get_reward` gives, tried again where it raises. A call that was given up may keep the environment busy
        for a while: it is waited for. Raises `EpisodeFailed`."""
        limits = self.driver.limits
        with self._at_work("judgement", rollouts.ENV_REWARD_S, reasons.REWARD, "get_reward fails"):
            for attempt in range(limits.reward_attempts - 1):
                try:
                    return await self._reward()
                except UserCodeError as error:
                    if isinstance(error, NotCalled) or self.instance.lost or error.kind == reasons.TIMEOUT:
                        raise
                    self.driver.counted[reasons.REWARD_RETRIED] += 1
                    self.driver.troubles.add(
                        "reward", f"get_reward {error.kind}", f"{self.stage.face.cls}.get_reward: {error}", error.where
                    )
                await self.driver.sleep(pause_s(attempt))
            return await self._reward()

    async def _reward(self) -> float | None:
        timeout_s = self.driver.limits.reward_timeout_s
        reward: float | None = await self.instance.call("get_reward", rewarded, timeout_s, wait_s=timeout_s)
        return reward

    async def _for_policy(self, text: str) -> str:
        """As a tool's answer: it may repeat what the policy said."""
        most = self.driver.episodes.limits.tool_result_tokens
        (read,) = await for_policy([ToolResult("respond", text)], most, self.stage.chat)
        if read.defused:
            told = told_of_defused(f"{self.stage.face.cls}.respond")
            self.driver.troubles.add("environment", "special tokens", told)
        return read.content

    @contextmanager
    def _at_work(self, place: Place, figure: str, reason: str, what: str) -> Iterator[None]:
        """Counts the time, and the episode as being there; an environment that failed serves no other episode."""
        started = self.driver.clock()
        try:
            with self.driver.episodes.capacity.being(place):
                yield
        except UserCodeError as error:
            self.instance.lost = self.instance.lost or not isinstance(error, NotCalled)
            raise _failed(reason, self.stage, what, error) from None
        finally:
            self.seconds[figure] = self.seconds.get(figure, 0.0) + self.driver.clock() - started


def _failed(reason: str, stage: EnvironmentKind, what: str, error: UserCodeError) -> EpisodeFailed:
    """The episode's failure, which another try may not meet."""
    text = f"environment {stage.face.cls}: {what}: {error}"
    if isinstance(error, NotCalled):
        return EpisodeFailed(reasons.WORKER_STOPPED, text, retryable=True)
    return EpisodeFailed(reason, text, True, reason, f"{what} {error.kind}", error.where)
