"""Episodes that begin with the row's prompt, all with the same one: their first turns are sampled by one request, or
by one for each part of a large group that gets its slots."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from rollout_worker.chat.base import ChatFormat
from rollout_worker.episodes.episode import Episode, EpisodeSetup, Opening
from rollout_worker.episodes.runner import EpisodeRunner
from rollout_worker.episodes.source import GroupPlan, outcome, prompt_ids
from rollout_worker.inference.failures import EpisodeFailed, FailureNotices
from rollout_worker.inference.router import Affinity, Siblings
from rollout_worker.tools.toolbox import ToolBox


@dataclass(frozen=True, slots=True)
class ConversationSource:
    """See `base.Driver`: the policy and the task's tools, in turns."""

    chat: ChatFormat
    tools: ToolBox
    episodes: EpisodeRunner
    troubles: FailureNotices

    def open(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        prompt, limits = plan.row.columns["prompt"], self.episodes.limits
        ids = await prompt_ids(self.chat, prompt, plan.row, limits.max_model_len, self.troubles)
        scene = EpisodeSetup(prompt, ids, self.chat, self.tools, own=plan.own)
        sampler, siblings = self.episodes.sampler, Siblings()
        affinities = [Affinity(siblings=siblings, born=plan.born) for _ in range(plan.count)]
        fills: list[asyncio.Task[None]] = []
        runs: list[asyncio.Task[Episode | EpisodeFailed]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                async for count in plan.reservation.parts():
                    part = affinities[len(runs) : len(runs) + count]
                    first = sampler.first_turn(part, ids, limits.turn(0, len(ids)).tokens, plan.own)
                    fills += [tasks.create_task(fill) for fill in first.fills]
                    for affinity, pending in zip(part, first.pending, strict=True):
                        opening = Opening(pending, plan.reservation)
                        runs.append(tasks.create_task(outcome(self.episodes.run(scene, affinity, opening))))
                await asyncio.wait(runs)
                for fill in fills:
                    fill.cancel()
        finally:
            sampler.pool.release(affinities)  # an episode that was cancelled before it began did not
        return [run.result() for run in runs]
