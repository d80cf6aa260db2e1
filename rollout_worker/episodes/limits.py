"""The limits of one episode: its time-out, and the tokens that a turn may sample.

The time-out does not count the seconds that an episode waits for a slot, or its agent for a thread: an episode is not
slow because the worker is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from slipstream.protocol.config import RunConfig
from slipstream.rollout_worker.episodes.capacity import Capacity
from slipstream.rollout_worker.tools.arguments import Weight, weigh

# Characters for each token of the context. Only rows of one character have more.
_CHARACTERS_PER_TOKEN = 32


class Deadline:
    """The time-out of one episode.

    Attributes:
        limit: The time-out itself, to be entered around the episode.
        paused_s: Seconds that it did not count.
    """

    def __init__(self, timeout_s: float) -> None:
        self.limit = asyncio.timeout(timeout_s)
        self.paused_s = 0.0
        self._pauses = 0
        self._left = timeout_s
        self._since = 0.0

    @contextlib.asynccontextmanager
    async def slot(self, capacity: Capacity, begun: bool) -> AsyncIterator[None]:
        """Hold a slot for one turn, without counting the wait for it. `begun`: whether the episode has sampled a turn
        before."""
        async with contextlib.AsyncExitStack() as held:
            with self.exclude_waiting():
                await held.enter_async_context(capacity.turn(begun))
            yield

    @contextlib.contextmanager
    def exclude_waiting(self) -> Iterator[None]:
        """Exclude the time inside. Only a block that is still running in the loop's next round pauses the time-out, so
        one that need not wait costs nothing. Several blocks may be open at once."""
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
    """Bounds of the next turn.

    Attributes:
        tokens: Maximum number of tokens; 0 or less if the episode is over.
        ends_as: Finish reason of an episode that has used them up.
    """

    tokens: int
    ends_as: Literal["length", "context"]


def size_fault(prompt: str | Sequence[Any], max_model_len: int) -> str | None:
    """Return why a prompt is too long, by its characters alone; None where its tokens have to be counted.

    To tokenise megabytes only to find that they are too long would cost seconds and a gigabyte.

    Args:
        prompt: Text, or messages.
    """
    most = max_model_len * _CHARACTERS_PER_TOKEN
    size = weigh(prompt, Weight(sys.maxsize, most)).characters
    if size <= most:
        return None
    return (
        f"has at least {size} characters, more than {_CHARACTERS_PER_TOKEN} for each of the {max_model_len} tokens of "
        f"vllm.max_model_len"
    )


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits from the run file, in tokens except for `max_turns`.

    A turn and an episode count the tokens that they sample; the context counts all tokens. `max_tool_result_tokens`
    None means half the context.
    """

    max_turn_tokens: int
    max_episode_tokens: int
    max_model_len: int
    max_turns: int
    max_tool_result_tokens: int | None = None
    max_images: int = 0

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
            config.images.max_per_episode,
        )

    @property
    def tool_result_tokens(self) -> int:
        """Maximum tokens of one tool result."""
        return self.max_model_len // 2 if self.max_tool_result_tokens is None else self.max_tool_result_tokens

    def turn(self, sampled: int, context: int) -> TurnBudget:
        """Return the budget of the next turn.

        Args:
            sampled: Tokens that the episode has sampled so far.
            context: Tokens of the next turn's prompt.
        """
        allowed = min(self.max_turn_tokens, self.max_episode_tokens - sampled)
        room = self.max_model_len - context
        return TurnBudget(room, "context") if room < allowed else TurnBudget(allowed, "length")
