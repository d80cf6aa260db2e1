"""Episodes that begin with the row's prompt, all with the same one: their first turns are sampled by one request."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from rollout_worker.chat.base import ChatFormat
from rollout_worker.drivers.base import Plan, outcome, prompt_ids
from rollout_worker.episode import Episode, EpisodeRunner, Opening
from rollout_worker.inference.errors import EpisodeFailed
from rollout_worker.inference.router import Affinity
from rollout_worker.scene import Scene
from rollout_worker.task.tools import ToolBox
from rollout_worker.troubles import Troubles


@dataclass(frozen=True, slots=True)
class Conversations:
    """See `base.Driver`: the policy and the task's tools, in turns."""

    chat: ChatFormat
    tools: ToolBox
    episodes: EpisodeRunner
    troubles: Troubles

    def open(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def run(self, plan: Plan) -> list[Episode | EpisodeFailed]:
        prompt, limits = plan.row.columns["prompt"], self.episodes.limits
        ids = await prompt_ids(self.chat, prompt, plan.row, limits.max_model_len, self.troubles)
        scene = Scene(prompt, ids, self.chat, self.tools)
        sampler = self.episodes.sampler
        affinities = [Affinity(born=plan.born) for _ in range(plan.count)]
        first = sampler.first_turn(affinities, ids, limits.turn(0, len(ids)).tokens)
        try:
            async with asyncio.TaskGroup() as tasks:
                fills = [tasks.create_task(fill) for fill in first.fills]
                runs = [
                    tasks.create_task(outcome(self.episodes.run(scene, affinity, Opening(pending, plan.reservation))))
                    for affinity, pending in zip(affinities, first.pending, strict=True)
                ]
                await asyncio.wait(runs)
                for fill in fills:
                    fill.cancel()
        finally:
            sampler.pool.release(affinities)  # an episode that was cancelled before it began did not
        return [run.result() for run in runs]
