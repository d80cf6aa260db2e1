"""Episodes in which the policy and the task's tools take turns, beginning with the row's own prompt.

All episodes of a group have the same prompt, so their first turns are sampled by one request, or by one for each part
of a large group that gets its slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.base import ChatFormat
from slipstream.rollout_worker.data.dataset import RowSample
from slipstream.rollout_worker.episodes.episode import Episode, EpisodeSetup, Opening
from slipstream.rollout_worker.episodes.source import GroupPlan, PromptFindings, SourceContext, outcome, prompt_ids
from slipstream.rollout_worker.inference.failures import EpisodeFailed
from slipstream.rollout_worker.inference.router import Affinity, Siblings
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.tools.toolbox import ToolBox, open_tools
from slipstream.rollout_worker.vision.messages import images_of, placed


@dataclass(frozen=True, slots=True)
class ConversationSource:
    """Makes conversations with tools."""

    chat: ChatFormat
    tools: ToolBox
    max_open: int
    own_rewards: Sequence[str] = ()

    @classmethod
    def accepts(cls, task: Task) -> bool:
        return task.agent is None and task.environment is None

    @classmethod
    @asynccontextmanager
    async def open(cls, context: SourceContext) -> AsyncIterator[Self]:
        config, task = context.config, context.task
        async with open_tools(config, task.tools, task.mcp_servers, context.code, context.errors) as tools:
            yield cls(context.build_chat(tools.schemas), tools, config.max_open)

    @classmethod
    async def check_samples(cls, context: SourceContext, samples: Sequence[RowSample]) -> list[PromptFindings]:
        config, task = context.config, context.task
        async with open_tools(config, task.tools, task.mcp_servers, context.code, context.errors) as tools:
            schemas = tools.schemas
        for sample in samples:
            if schemas and isinstance(sample.first, Mapping) and isinstance(sample.first["prompt"], str):
                raise ConfigError(
                    f"task.mcp_servers = {config.task.mcp_servers}: the prompts{sample.suffix} are text, and tools "
                    f"need a conversation; make each prompt a list of messages: [{{'role': 'user', 'content': ...}}]"
                )
        chat = context.build_chat(schemas)
        return [PromptFindings(lambda row: chat) for _ in samples]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return self.tools.schemas

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        prompt, episodes = self.tools.without_nulls(plan.row.columns["prompt"]), plan.episodes
        limits, sampler, siblings = episodes.limits, episodes.sampler, Siblings()
        ids = await prompt_ids(self.chat, prompt, plan.row, limits.max_model_len, episodes.notices)
        images = placed(ids, images_of(prompt))
        setup = EpisodeSetup(prompt, ids, self.chat, self.tools, own=plan.own, prompt_images=images)
        affinities = [Affinity(siblings=siblings, born=plan.born) for _ in range(plan.count)]
        fills: list[asyncio.Task[None]] = []
        runs: list[asyncio.Task[Episode | EpisodeFailed]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                async for count in plan.reservation.parts():
                    part = affinities[len(runs) : len(runs) + count]
                    first = sampler.first_turn(part, ids, limits.turn(0, len(ids)).tokens, plan.own, images)
                    fills += [tasks.create_task(fill) for fill in first.fills]
                    for affinity, pending in zip(part, first.pending, strict=True):
                        opening = Opening(pending, plan.reservation)
                        runs.append(tasks.create_task(outcome(episodes.run(setup, affinity, opening))))
                await asyncio.wait(runs)
                for fill in fills:
                    fill.cancel()
        finally:
            # An episode that was cancelled before it began did not release its own.
            sampler.pool.release(affinities)
        return [run.result() for run in runs]
