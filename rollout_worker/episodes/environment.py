"""Plays each episode in its own environment, which may add to the row's prompt, answer turns and give a reward.

No episode waits for another's reset, answer or reward, and none holds a slot while it waits for its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from slipstream.protocol import reasons, rollouts, tracing
from slipstream.protocol.client import retry_pause_s
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.sections import WorkerSection
from slipstream.rollout_worker.chat.base import ChatFormat, PromptError
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.data.columns import ENVIRONMENTS
from slipstream.rollout_worker.data.dataset import RowSample
from slipstream.rollout_worker.episodes.capacity import Activity
from slipstream.rollout_worker.episodes.episode import Episode, EpisodeSetup, NoReward
from slipstream.rollout_worker.episodes.limits import size_fault
from slipstream.rollout_worker.episodes.runner import EpisodeRunner
from slipstream.rollout_worker.episodes.source import (
    GroupPlan,
    PromptFindings,
    SourceContext,
    TicketFailed,
    prompt_ids,
    side_by_side,
)
from slipstream.rollout_worker.episodes.tool_results import describe_defused, for_policy
from slipstream.rollout_worker.inference.failures import EpisodeFailed
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.task.environment_instance import Instance, answered, folded, observed, rewarded
from slipstream.rollout_worker.task.environments import EnvironmentKind, Environments, check_row, open_environments
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.tools.base import Content, ToolResult
from slipstream.rollout_worker.tools.toolbox import open_tools
from slipstream.rollout_worker.user_code import NotCalled, UserCodeError
from slipstream.rollout_worker.vision.messages import images_of, placed, seen_prompt
from slipstream.rollout_worker.vision.sources import ImageError

# Maximum number of rows whose environment is checked before a run, and of resets that are tried for each environment.
MAX_CHECKED_ROWS = 1000
MAX_TRIED_RESETS = 3


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """Makes episodes that are played in the task's environments."""

    environments: Environments
    config: RunConfig

    @classmethod
    def accepts(cls, task: Task) -> bool:
        return task.environment is not None

    @classmethod
    @asynccontextmanager
    async def open(cls, context: SourceContext) -> AsyncIterator[Self]:
        config, task, code = context.config, context.task, context.code
        async with (
            open_tools(config, task.tools, task.mcp_servers, code, context.errors) as tools,
            open_environments(config, task, tools, code, context.build_chat, context.notify) as environments,
        ):
            yield cls(environments, config)

    @classmethod
    async def check_samples(cls, context: SourceContext, samples: Sequence[RowSample]) -> list[PromptFindings]:
        async with cls.open(context) as source:
            found = []
            for sample in samples:
                with sample.naming():
                    found.append(await source._try_resets(context.task, sample))
            return found

    @property
    def chat(self) -> ChatFormat:
        return self.environments.chat

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return self.environments.described

    @property
    def own_rewards(self) -> list[str]:
        return self.environments.rewards

    @property
    def max_open(self) -> int:
        return self.config.max_open

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        try:
            kind = self.environments.kind_of(plan.row.columns)
            columns = self.environments.reset_columns(kind, plan.row.columns)
        except ConfigError as error:
            detail = f"row {plan.row.number} cannot be played: {error}"
            plan.episodes.notices.add("row", reasons.ENVIRONMENT, detail)
            raise TicketFailed(reasons.ROW, detail, retryable=False) from None
        return await side_by_side(plan, partial(self._episode, plan, kind, columns))

    async def _episode(
        self, plan: GroupPlan, kind: EnvironmentKind, columns: Mapping[str, Any], affinity: Affinity
    ) -> Episode:
        """Play one episode, whose environment is kept until the group has its rewards. Raises `EpisodeFailed`."""
        pool, episodes = self.environments.pool, plan.episodes
        try:
            instance = await pool.take(kind.name)
        except UserCodeError as error:
            raise _failed(reasons.ENVIRONMENT, kind, "no instance can be made", error) from None
        play = _Play(self.config.worker, episodes, kind, instance)
        try:
            prompt = await play.reset(kind.tools.without_nulls(plan.row.columns["prompt"]), columns)
            try:
                ids = await prompt_ids(kind.chat, prompt, plan.row, episodes.limits.max_model_len, episodes.notices)
            except TicketFailed as failure:
                raise EpisodeFailed(failure.reason, str(failure), failure.retryable) from None
            respond = play.respond if kind.interface.responds else None
            tools, images = instance.tools(kind.tools), placed(ids, images_of(prompt))
            setup = EpisodeSetup(prompt, ids, kind.chat, tools, respond, plan.own, images)
            episode = await episodes.run(setup, affinity)
            if kind.interface.rewards:
                episode.rewards[kind.interface.cls] = await play.reward()
        except BaseException:
            pool.give_back(instance)
            raise
        # Looked up when the rewards are computed: an episode must not keep an object that a thread is to free.
        episode.reward_inputs = lambda: {ENVIRONMENTS: instance.object}
        episode.why_no_reward = NoReward(reasons.NO_REWARD, f"{kind.interface.cls}.get_reward returned None")
        episode.rollout.metrics |= play.seconds
        plan.after.callback(pool.give_back, instance)
        return episode

    async def _try_resets(self, task: Task, sample: RowSample) -> PromptFindings:
        """Reset each environment with a few rows. Raises `ConfigError` for a row that names no environment, and where
        every reset of one fails."""
        assert task.environment is not None
        tried: dict[str | None, list[tuple[int, Mapping[str, Any]]]] = {name: [] for name in self.environments.kinds}
        for number, columns in sample.sample(MAX_CHECKED_ROWS):
            if not isinstance(columns, Mapping):  # the check of the rows names those that cannot be read
                continue
            if fault := check_row(task.environment, columns):
                raise ConfigError(f"Task(environment={{...}}): row {number} cannot be played: {fault}")
            tried[self.environments.kind_of(columns).name].append((number, columns))
        lengths: list[int] = []
        warnings: list[str] = []
        for name, kind in self.environments.kinds.items():
            few = tried[name][:MAX_TRIED_RESETS]
            if not few and not sample.evaluated:
                warnings.append(f"no row that was looked at names the environment {name!r}: it is not used")
            column = kind.interface.begins_by
            if few and column is not None and not any(column in columns for _, columns in tried[name]):
                warnings.append(
                    f"no row that was looked at{sample.suffix} has a column {column!r}, so the episodes of a group may "
                    f"begin differently in {kind.interface.cls}, and their rewards are compared all the same; give "
                    f"each row one: dataset=[{{{column!r}: 0}}, {{{column!r}: 1}}, ...]"
                )
            outcomes = await asyncio.gather(*(self._try_reset(sample, kind, *row) for row in few))
            failed = [outcome for outcome in outcomes if isinstance(outcome, str)]
            if few and len(failed) == len(few):
                remedy = "fix it there, or raise worker.environment_timeout_s"
                raise ConfigError(f"Task(environment=...): {failed[0]}; {remedy}")
            warnings += failed
            lengths += [outcome for outcome in outcomes if isinstance(outcome, int)]
        return PromptFindings(lambda row: self.environments.kind_of(row).chat, lengths, warnings)

    async def _try_reset(
        self, sample: RowSample, kind: EnvironmentKind, number: int, columns: Mapping[str, Any]
    ) -> int | str:
        """Return the number of tokens of the prompt that a reset gives, or the text of its failure."""
        arguments = self.environments.reset_columns(kind, columns)
        try:
            instance = await self.environments.pool.take(kind.name)
        except UserCodeError as error:
            return f"no instance of {kind.interface.cls} can be made: {error}{_at(error)}"
        try:
            read = partial(observed, images=kind.chat.images)
            observation = await instance.call("reset", read, self.config.worker.environment_timeout_s, arguments)
            prompt = folded(seen_prompt(columns["prompt"], columns, kind.chat.images), observation)
            if fault := size_fault(prompt, self.config.vllm.max_model_len):
                raise PromptError(f"it {fault}; raise it, or have reset return less")
            return len(await kind.chat.prompt_ids(prompt))
        except UserCodeError as error:
            instance.lost = True
            return f"{kind.interface.cls}.reset fails on row {number}{sample.suffix}: {error}{_at(error)}"
        except (PromptError, ImageError) as error:
            return f"what {kind.interface.cls}.reset gives on row {number}{sample.suffix} cannot be rendered: {error}"
        finally:
            self.environments.pool.give_back(instance)


@dataclass(slots=True)
class _Play:
    """Calls the environment of one episode. `seconds`: time that the calls took, by metric name."""

    limits: WorkerSection
    episodes: EpisodeRunner
    kind: EnvironmentKind
    instance: Instance
    prompt: list[Message] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    async def reset(self, prompt: Sequence[Message], columns: Mapping[str, Any]) -> list[Message]:
        """Return the episode's prompt. Raises `EpisodeFailed`."""
        timeout_s = self.limits.environment_timeout_s
        with self._at_work("tools", rollouts.ENV_RESET_S, reasons.ENVIRONMENT, "reset fails"):
            read = partial(observed, images=self.kind.chat.images)
            observation = await self.instance.call("reset", read, timeout_s, dict(columns))
        self.prompt = folded(prompt, observation)
        return self.prompt

    async def respond(self, messages: Sequence[Message]) -> list[Message] | None:
        """Answer the conversation, as `Respond`."""
        conversation = {"messages": [*self.prompt, *messages]}
        with self._at_work("tools", rollouts.ENV_RESPOND_S, reasons.ENVIRONMENT, "respond fails"):
            read = partial(answered, images=self.kind.chat.images)
            answers = await self.instance.call("respond", read, self.limits.tool_timeout_s, conversation)
        if answers is None:
            return None
        if len(answers) > (most := self.episodes.limits.max_model_len):  # each takes a token at least
            what = f"respond returned {len(answers)} messages, and vllm.max_model_len is {most}; return fewer"
            text = f"environment {self.kind.interface.cls}: {what}"
            raise EpisodeFailed(reasons.ENVIRONMENT, text, True, reasons.ENVIRONMENT, "respond messages")
        return [{**message, "content": await self._for_policy(message["content"])} for message in answers]

    async def reward(self) -> float | None:
        """Call `get_reward`, again where it raises. Waits for a call that timed out and still keeps the environment
        busy. Raises `EpisodeFailed`."""
        with self._at_work("judgement", rollouts.ENV_REWARD_S, reasons.REWARD, "get_reward fails"):
            for attempt in range(self.limits.reward_attempts - 1):
                try:
                    return await self._reward()
                except UserCodeError as error:
                    if isinstance(error, NotCalled) or self.instance.lost or error.kind == reasons.TIMEOUT:
                        raise
                    self.episodes.failures[reasons.REWARD_RETRIED] += 1
                    text = f"{self.kind.interface.cls}.get_reward: {error}"
                    self.episodes.notices.add("reward", f"get_reward {error.kind}", text, error.where)
                await self.episodes.sleep(retry_pause_s(attempt))
            return await self._reward()

    async def _reward(self) -> float | None:
        timeout_s = self.limits.reward_timeout_s
        reward: float | None = await self.instance.call("get_reward", rewarded, timeout_s, wait_s=timeout_s)
        return reward

    async def _for_policy(self, content: Content) -> Content:
        """Treat the text as a tool's answer: it may repeat what the policy said."""
        most = self.episodes.limits.tool_result_tokens
        (read,) = await for_policy([ToolResult("respond", content)], most, self.kind.chat)
        if read.defused:
            text = describe_defused(f"{self.kind.interface.cls}.respond")
            self.episodes.notices.add("environment", "special tokens", text)
        return read.content

    @contextmanager
    def _at_work(self, activity: Activity, metric: str, reason: str, what: str) -> Iterator[None]:
        """Count the time, and the episode as being at `activity`. An environment that fails serves no other episode."""
        started = self.episodes.clock()
        try:
            with self.episodes.capacity.being(activity), tracing.span(metric.removesuffix("_s")):
                yield
        except UserCodeError as error:
            self.instance.lost = self.instance.lost or not isinstance(error, NotCalled)
            raise _failed(reason, self.kind, what, error) from None
        finally:
            self.seconds[metric] = self.seconds.get(metric, 0.0) + self.episodes.clock() - started


def _failed(reason: str, kind: EnvironmentKind, what: str, error: UserCodeError) -> EpisodeFailed:
    """Return the failure of an episode; another attempt may succeed."""
    text = f"environment {kind.interface.cls}: {what}: {error}"
    if isinstance(error, NotCalled):
        return EpisodeFailed(reasons.WORKER_STOPPED, text, retryable=True)
    return EpisodeFailed(reason, text, True, reason, f"{what} {error.kind}", error.where)


def _at(error: UserCodeError) -> str:
    return f" ({error.where})" if error.where else ""
