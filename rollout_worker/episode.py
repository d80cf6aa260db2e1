"""One episode: turns of the policy and its tools, tokens in and tokens out.

A turn enters the episode whole, with the tool messages before it, once it is sampled; so whatever ends an episode
leaves only what the policy saw. The ids of turn k + 1's request are those of turn k's request, its sampled ids, and the
suffix with the tool messages: nothing else, and nothing twice (I4).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from protocol import reasons
from protocol.messages import FinishReason, Rollout, Segment, VersionSpan
from rollout_worker.budget import Limits
from rollout_worker.chat.base import ChatFormat, Message
from rollout_worker.inference.errors import EpisodeFailed
from rollout_worker.inference.pool import Affinity
from rollout_worker.inference.sampler import PendingChoice, Sampler
from rollout_worker.inference.wire import Sampled, SampledSpan
from rollout_worker.task.tools import ToolBox, ToolResult
from rollout_worker.troubles import Troubles


@dataclass(slots=True)
class Episode:
    """What one episode has come to. `ids` begins with the prompt's; `messages` are those after it; `text`: the last
    turn's. `rollout` gets its segments when the group is put together, and its reward before that."""

    prompt_size: int
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    rollout: Rollout
    spans: list[SampledSpan] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    sampled_tokens: int = 0

    @classmethod
    def begin(cls, prompt_ids: list[int]) -> Episode:
        size = len(prompt_ids)
        timings = {"generate": 0.0, "tools": 0.0, "total": 0.0}
        rollout = Rollout([], reward=math.nan, finish_reason="stop", timings=timings)
        return cls(size, list(prompt_ids), [False] * size, [0.0] * size, rollout)

    @property
    def completion_ids(self) -> list[int]:
        return self.ids[self.prompt_size :]

    def add_turn(self, suffix: list[int], turn: Sampled) -> None:
        """Append the tool messages' ids and what was sampled after them."""
        self.ids += suffix
        self.mask += [False] * len(suffix)
        self.logprobs += [0.0] * len(suffix)
        self.spans += [span.moved(len(self.ids)) for span in turn.spans]
        self.ids += turn.token_ids
        self.mask += [True] * len(turn.token_ids)
        self.logprobs += turn.logprobs
        self.sampled_tokens += len(turn.token_ids)
        self.rollout.turns += 1

    def segment(self, server_names: Sequence[str]) -> Segment:
        """The tokens so far; spans name their servers by place in `server_names`."""
        return Segment(
            token_ids=np.array(self.ids, dtype=np.int32),
            loss_mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=[
                VersionSpan(span.version, span.start, span.end, server_names.index(span.server)) for span in self.spans
            ],
        )


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Runs episodes; holds no state of any of them."""

    sampler: Sampler
    limits: Limits
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    troubles: Troubles = field(default_factory=Troubles)

    async def run(
        self, prompt_ids: list[int], chat: ChatFormat, tools: ToolBox, affinity: Affinity, pending: PendingChoice | None
    ) -> Episode:
        """An episode from its prompt to its end; `pending`, if given, is its first turn. Raises `EpisodeFailed`."""
        episode = Episode.begin(prompt_ids)
        try:
            with self._timed(episode, "total"):
                async with asyncio.timeout(self.timeout_s):
                    episode.rollout.finish_reason = await self._turns(episode, chat, tools, affinity, pending)
        except TimeoutError:
            if not episode.rollout.turns:
                detail = f"no turn was done in {self.timeout_s:g} s"
                raise EpisodeFailed(reasons.TIMEOUT, detail, retryable=True) from None
            episode.rollout.finish_reason = "timeout"
        finally:
            self.sampler.pool.release([affinity])
        return episode

    async def _turns(
        self, episode: Episode, chat: ChatFormat, tools: ToolBox, affinity: Affinity, pending: PendingChoice | None
    ) -> FinishReason:
        rollout = episode.rollout
        suffix: list[int] | None = []
        answers: list[Message] = []
        while suffix is not None:
            prompt_ids = episode.ids + suffix
            budget = self.limits.turn(episode.sampled_tokens, len(prompt_ids))
            if budget.tokens <= 0:
                return budget.ends_as
            with self._timed(episode, "generate"):
                turn = await self.sampler.sample(affinity, prompt_ids, budget.tokens, pending)
            pending = None
            episode.add_turn(suffix, turn)
            parsed = chat.parse(prompt_ids, turn.token_ids)
            episode.text = parsed.text
            episode.messages += [*answers, parsed.message()]
            if turn.finish_reason == "length":
                return budget.ends_as
            if not parsed.calls:
                return "stop"
            if rollout.turns >= self.limits.max_turns:
                return "turn_limit"
            if (left := self.limits.turn(episode.sampled_tokens, len(episode.ids))).tokens <= 0:
                return left.ends_as
            with self._timed(episode, "tools"):
                results = await tools.run(parsed.calls)
            self._count(results, rollout)
            answers = [result.message() for result in results]
            suffix = await chat.suffix_ids(prompt_ids, turn.token_ids, answers)
        return "aborted"

    def _count(self, results: Sequence[ToolResult], rollout: Rollout) -> None:
        """Calls and failures, in all, by tool and by reason; what the tools' own code raised is a trouble."""
        rollout.tool_calls += len(results)
        for result in results:
            of_tool = f"tools/{result.counted_as}"
            counts = {f"{of_tool}/calls": 1, f"{of_tool}/failures": result.failed}
            if result.failed:
                counts[f"{of_tool}/failures/{result.reason}"] = 1
            if result.coerced:
                counts[f"{of_tool}/coerced"] = 1
            for name, count in counts.items():
                rollout.metrics[name] = rollout.metrics.get(name, 0.0) + count
            rollout.tool_failures += result.failed
            if (error := result.error) is not None:
                self.troubles.add("tool", f"{result.name} {error.kind}", f"tool {result.name}: {error}", error.where)

    @contextmanager
    def _timed(self, episode: Episode, what: str) -> Iterator[None]:
        started = self.clock()
        try:
            yield
        finally:
            episode.rollout.timings[what] += self.clock() - started
