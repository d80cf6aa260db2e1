"""One episode: turns of the policy and its tools, tokens in and tokens out.

A turn enters the episode whole, with the tool messages before it, once it is sampled; so whatever ends an episode
leaves only what the policy saw. Ids of turn k + 1's request are those of turn k's request, its sampled ids, and the
suffix with the tool messages: nothing else, and nothing twice (I4).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocol.messages import FinishReason, Segment, VersionSpan
from rollout_worker.budget import Limits
from rollout_worker.chat.parsers import hermes
from rollout_worker.chat.template import ChatFormat
from rollout_worker.inference.errors import EpisodeFailed
from rollout_worker.inference.router import Affinity
from rollout_worker.inference.sampler import PendingChoice, Sampler
from rollout_worker.inference.wire import Sampled
from rollout_worker.task.tools import ToolBox, ToolResult


@dataclass(slots=True)
class Episode:
    """What one episode has come to. `ids` begins with the prompt; `messages` are those after it."""

    prompt_size: int
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    spans: list[VersionSpan] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    sampled_tokens: int = 0
    turns: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    finish_reason: FinishReason = "stop"
    timings: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "tools": 0.0, "total": 0.0})

    @classmethod
    def begin(cls, prompt: list[int]) -> Episode:
        size = len(prompt)
        return cls(prompt_size=size, ids=list(prompt), mask=[False] * size, logprobs=[0.0] * size)

    @property
    def completion_ids(self) -> list[int]:
        return self.ids[self.prompt_size :]

    def add_turn(self, suffix: list[int], turn: Sampled) -> None:
        """Append the tool messages' ids and what was sampled after them."""
        self.ids += suffix
        self.mask += [False] * len(suffix)
        self.logprobs += [0.0] * len(suffix)
        start = len(self.ids)
        self.spans += [VersionSpan(span.version, span.start + start, span.end + start, 0) for span in turn.spans]
        self.ids += turn.token_ids
        self.mask += [True] * len(turn.token_ids)
        self.logprobs += turn.logprobs
        self.sampled_tokens += len(turn.token_ids)
        self.turns += 1

    def segment(self) -> Segment:
        return Segment(
            token_ids=np.array(self.ids, dtype=np.int32),
            loss_mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=self.spans,
        )


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Runs episodes of one task; holds no state of any of them."""

    chat: ChatFormat
    tools: ToolBox
    sampler: Sampler
    limits: Limits
    timeout_s: float
    clock: Callable[[], float] = time.monotonic

    async def run(self, prompt: list[int], affinity: Affinity, pending: PendingChoice | None) -> Episode:
        """An episode from its prompt's ids to its end. Raises `EpisodeFailed`."""
        episode = Episode.begin(prompt)
        started = self.clock()
        try:
            async with asyncio.timeout(self.timeout_s):
                episode.finish_reason = await self._turns(episode, affinity, pending)
        except TimeoutError:
            if not episode.turns:
                raise EpisodeFailed("timeout", f"no turn was done in {self.timeout_s:g} s", retryable=True) from None
            episode.finish_reason = "timeout"
        finally:
            self.sampler.pool.release([affinity])
            episode.timings["total"] = self.clock() - started
        return episode

    async def _turns(self, episode: Episode, affinity: Affinity, pending: PendingChoice | None) -> FinishReason:
        suffix: list[int] = []
        results: list[ToolResult] = []
        while True:
            budget = self.limits.turn(episode.sampled_tokens, len(episode.ids) + len(suffix))
            if budget.tokens <= 0:
                return budget.ends_as
            turn = await self._sample(episode, suffix, affinity, budget.tokens, pending)
            pending = None
            episode.add_turn(suffix, turn)
            episode.messages += [result.message() for result in results]
            episode.text = self.chat.text(turn.token_ids)
            parsed = hermes.parse(episode.text) if self.tools.schemas else hermes.ParsedTurn(episode.text, [])
            episode.messages.append(parsed.message())
            if turn.finish_reason == "length":
                return budget.ends_as
            if not parsed.calls:
                return "stop"
            if episode.turns >= self.limits.max_turns:
                return "turn_limit"
            if (left := self.limits.turn(episode.sampled_tokens, len(episode.ids))).tokens <= 0:
                return left.ends_as
            results = await self._run_tools(episode, parsed)
            suffix = await self.chat.suffix_ids([result.message() for result in results])

    async def _sample(
        self, episode: Episode, suffix: list[int], affinity: Affinity, max_tokens: int, pending: PendingChoice | None
    ) -> Sampled:
        started = self.clock()
        try:
            return await self.sampler.sample(affinity, episode.ids + suffix, max_tokens, pending)
        finally:
            episode.timings["generate"] += self.clock() - started

    async def _run_tools(self, episode: Episode, parsed: hermes.ParsedTurn) -> list[ToolResult]:
        started = self.clock()
        try:
            results = await self.tools.run(parsed.calls)
        finally:
            episode.timings["tools"] += self.clock() - started
        episode.tool_calls += len(results)
        episode.tool_failures += sum(result.failed for result in results)
        return results
