"""One ticket: its row's prompt, the group's episodes side by side, their rewards, the group."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from protocol.messages import Group, Rollout, Ticket
from rollout_worker.episode import Episode, EpisodeRunner
from rollout_worker.inference.errors import EpisodeFailed
from rollout_worker.inference.router import Affinity
from rollout_worker.inference.sampler import PendingChoice
from rollout_worker.task.rewards import RewardBatch, RewardError, RewardFunctions, Score
from rollout_worker.task.task import Row, Task

logger = logging.getLogger(__name__)

MIN_ROLLOUTS = 2


class TicketFailed(Exception):
    """No group came of the ticket. `reason` is counted; `retryable` false means that another try would fail alike."""

    def __init__(self, reason: str, detail: str, retryable: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retryable = retryable


@dataclass(slots=True)
class Counters:
    """What a worker has done, since its start; `failures` counts by reason."""

    episodes_done: int = 0
    episodes_failed: int = 0
    tokens_sampled: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def count(self, outcome: Episode | EpisodeFailed) -> None:
        if isinstance(outcome, EpisodeFailed):
            self.episodes_failed += 1
            self.failures[outcome.reason] += 1
            return
        self.episodes_done += 1
        self.tokens_sampled += outcome.sampled_tokens
        self.tool_calls += outcome.tool_calls
        self.tool_failures += outcome.tool_failures


@dataclass(frozen=True, slots=True)
class GroupRunner:
    """Makes groups of tickets. `wall_clock` gives seconds since the epoch."""

    task: Task
    rewards: RewardFunctions
    episodes: EpisodeRunner
    counters: Counters
    worker_id: str
    keep_messages: bool
    wall_clock: Callable[[], float] = time.time

    async def run(self, ticket: Ticket) -> Group:
        """The group of a ticket. Raises `TicketFailed`."""
        started_at = self.wall_clock()
        row = self._row(ticket)
        prompt = row.columns["prompt"]
        prompt_ids = await self._prompt_ids(prompt)
        affinities = [Affinity() for _ in range(ticket.group_size)]
        outcomes = await self._run_episodes(prompt_ids, affinities)
        for outcome in outcomes:
            self.counters.count(outcome)
        episodes = [outcome for outcome in outcomes if isinstance(outcome, Episode)]
        _require(len(episodes), [outcome for outcome in outcomes if isinstance(outcome, EpisodeFailed)])
        rollouts = await self._rewarded(row, prompt, episodes)
        return Group(
            ticket_id=ticket.id,
            index=ticket.index,
            epoch=row.epoch,
            rollouts=rollouts,
            worker_id=self.worker_id,
            server_names=sorted({name for affinity in affinities for name in affinity.visited}),
            started_at=started_at,
            finished_at=self.wall_clock(),
        )

    def _row(self, ticket: Ticket) -> Row:
        try:
            row = self.task.row_for(ticket.index, ticket.seed)
            if not row.columns["prompt"]:
                raise ValueError("its prompt is empty")
            return row
        except Exception as error:  # the data set is the user's
            raise TicketFailed("row", f"row of index {ticket.index}: {error!r}", retryable=False) from error

    async def _prompt_ids(self, prompt: Any) -> list[int]:
        try:
            ids = await self.episodes.chat.prompt_ids(prompt)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise TicketFailed("prompt", f"the prompt cannot be rendered: {error!r}", retryable=False) from error
        limit = self.episodes.limits.max_model_len
        if not 0 < len(ids) < limit:
            raise TicketFailed("prompt", f"the prompt has {len(ids)} tokens, the context {limit}", retryable=False)
        return ids

    async def _run_episodes(self, prompt: list[int], affinities: list[Affinity]) -> list[Episode | EpisodeFailed]:
        first = self.episodes.sampler.first_turn(affinities, prompt, self.episodes.limits.turn(0, len(prompt)).tokens)
        try:
            async with asyncio.TaskGroup() as tasks:
                fills = [tasks.create_task(fill) for fill in first.fills]
                runs = [
                    tasks.create_task(self._run_episode(prompt, affinity, pending))
                    for affinity, pending in zip(affinities, first.pending, strict=True)
                ]
                await asyncio.wait(runs)
                for fill in fills:
                    fill.cancel()
        finally:
            self.episodes.sampler.pool.release(affinities)  # an episode that was cancelled before it began did not
        return [run.result() for run in runs]

    async def _run_episode(
        self, prompt: list[int], affinity: Affinity, pending: PendingChoice
    ) -> Episode | EpisodeFailed:
        """A failure is returned, not raised: it must not end the siblings."""
        try:
            return await self.episodes.run(prompt, affinity, pending)
        except EpisodeFailed as failure:
            return failure
        except Exception as error:
            logger.exception("an episode failed in a way that is not foreseen")
            return EpisodeFailed("internal", repr(error), retryable=True)

    async def _rewarded(self, row: Row, prompt: Any, episodes: list[Episode]) -> list[Rollout]:
        started = self.episodes.clock()
        batch = RewardBatch(
            prompt=prompt,
            completions=[episode.text if isinstance(prompt, str) else episode.messages for episode in episodes],
            completion_ids=[episode.completion_ids for episode in episodes],
            columns=row.columns,
        )
        try:
            scores = await self.rewards.score(batch)
        except RewardError as error:
            raise TicketFailed("reward", str(error), retryable=True) from error
        seconds = self.episodes.clock() - started
        rollouts = [
            self._rollout(episode, score, score.reward, seconds)
            for episode, score in zip(episodes, scores, strict=True)
            if score.reward is not None
        ]
        unrewarded = len(episodes) - len(rollouts)
        if unrewarded:
            self.counters.failures["no_reward"] += unrewarded
        failure = EpisodeFailed("no_reward", "every reward function gave None", retryable=True)
        _require(len(rollouts), [failure] * unrewarded)
        return rollouts

    def _rollout(self, episode: Episode, score: Score, reward: float, reward_s: float) -> Rollout:
        return Rollout(
            segments=[episode.segment()],
            reward=reward,
            finish_reason=episode.finish_reason,
            reward_components=score.components,
            turns=episode.turns,
            tool_calls=episode.tool_calls,
            tool_failures=episode.tool_failures,
            timings={**episode.timings, "reward": reward_s},
            messages=json.dumps(episode.messages).encode() if self.keep_messages else None,
        )


def _require(rollouts: int, failures: list[EpisodeFailed]) -> None:
    """An advantage needs rollouts to compare: with fewer than two the ticket has failed, for the commonest reason."""
    if rollouts >= MIN_ROLLOUTS:
        return
    reason = Counter(failure.reason for failure in failures).most_common(1)[0][0]
    detail = next(str(failure) for failure in failures if failure.reason == reason)
    raise TicketFailed(
        reason,
        f"{len(failures)} of {rollouts + len(failures)} episodes failed: {detail}",
        retryable=any(failure.retryable for failure in failures),
    )
