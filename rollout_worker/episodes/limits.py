"""An episode's time-out, which stands still while it waits for a slot, or an agent for its thread: it is not slow
because the worker is.

The context budget: how many tokens a turn may sample, and what an episode ends as when there are none left.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from protocol.config import RunConfig
from rollout_worker.episodes.capacity import Capacity


class Deadline:
    """Use `limit` around the episode; `paused_s`: seconds that it stood still."""

    def __init__(self, timeout_s: float) -> None:
        self.limit = asyncio.timeout(timeout_s)
        self.paused_s = 0.0
        self._pauses = 0
        self._left = timeout_s
        self._since = 0.0

    @contextlib.asynccontextmanager
    async def slot(self, capacity: Capacity, begun: bool) -> AsyncIterator[None]:
        """A slot for one turn; `begun`: the episode has sampled a turn before."""
        async with contextlib.AsyncExitStack() as held:
            with self.paused():
                await held.enter_async_context(capacity.turn(begun))
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time does not count inside. Only what is still inside in the loop's next round pauses it: what need not wait
        costs nothing. Several may be at once."""
        loop = asyncio.get_running_loop()
        began: list[bool] = []
        soon = loop.call_soon(self._pause, began, loop.time())
        try:
            yield
        finally:
            soon.cancel()
            if began:
                self._resume()

    def _pause(self, began: list[bool], since: float) -> None:
        began.append(True)
        self._pauses += 1
        if self._pauses == 1 and (ends := self.limit.when()) is not None:
            self._since = since
            self._left = ends - since
            self._move(None)

    def _resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0:
            now = asyncio.get_running_loop().time()
            self.paused_s += now - self._since
            self._move(now + self._left)

    def _move(self, ends: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the episode is over
            self.limit.reschedule(ends)


@dataclass(frozen=True, slots=True)
class TurnBudget:
    """`tokens` that the next turn may sample, 0 or less if the episode is over; `ends_as`: the finish reason of an
    episode that used them up."""

    tokens: int
    ends_as: Literal["length", "context"]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """All but the turns in tokens; a turn and an episode count what they sample, the context counts everything.
    `max_tool_result_tokens`: None is half the context."""

    max_turn_tokens: int
    max_episode_tokens: int
    max_model_len: int
    max_turns: int
    max_tool_result_tokens: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        rollout = config.rollout
        result = None if rollout.max_tool_result_tokens == "auto" else rollout.max_tool_result_tokens
        return cls(
            rollout.max_turn_tokens,
            rollout.max_episode_tokens,
            config.vllm.max_model_len,
            rollout.max_turns or sys.maxsize,  # 0: any number; each samples a token, so the episode's tokens end it
            result,
        )

    @property
    def tool_result_tokens(self) -> int:
        """Tokens that one tool result may have."""
        return self.max_model_len // 2 if self.max_tool_result_tokens is None else self.max_tool_result_tokens

    def turn(self, sampled: int, context: int) -> TurnBudget:
        """The next turn's budget, with `sampled` tokens of the episode and `context` tokens in all so far."""
        allowed = min(self.max_turn_tokens, self.max_episode_tokens - sampled)
        room = self.max_model_len - context
        return TurnBudget(room, "context") if room < allowed else TurnBudget(allowed, "length")
