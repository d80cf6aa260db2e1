"""Counts the answers, tokens and segments that an agent's episode may still sample, over all its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slipstream.protocol.messages import FinishReason
from slipstream.rollout_worker.agent.api.messages import CONTEXT, TURNS, ApiError
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.episodes.limits import EpisodeLimits, TurnBudget, size_fault
from slipstream.rollout_worker.episodes.runner import MAX_SEGMENTS


class Allowance:
    """The allowance of one episode.

    Attributes:
        ended_as: The limit that the last request met; None if it met none.
        in_flight: Number of answers that are being sampled.
    """

    def __init__(self, limits: EpisodeLimits) -> None:
        self.ended_as: FinishReason | None = None
        self.in_flight = 0
        self._limits = limits
        # Turns and tokens that were sampled, even if the agent never got them, and tokens that answers in flight may
        # add.
        self._turns = self._tokens = self._reserved = 0
        self._changed = asyncio.Event()

    async def budget(self, size: int, most: int | None, recorded: int, segments: int, appends: bool) -> TurnBudget:
        """Return the tokens that an answer may sample. Waits for other answers in flight where they may use it up.

        Args:
            size: Tokens of the answer's prompt.
            most: Tokens that the request asks for.
            recorded: Number of answers so far.
            segments: Number of segments so far.
            appends: Whether the answer continues in an existing segment.

        Raises:
            ApiError: The episode has reached a limit.
        """
        limits = self._limits
        while True:
            if self._turns + self.in_flight >= limits.max_turns:
                self.ended_as = "turn_limit"
                text = f"the episode has had its {limits.max_turns} answers (rollout.max_turns)"
                raise ApiError(400, text, TURNS)
            on_their_way = self._turns - recorded + self.in_flight  # Each answer in flight may begin a segment.
            if segments + on_their_way >= MAX_SEGMENTS and (on_their_way or not appends):
                self.ended_as = "turn_limit"
                text = f"the episode has {MAX_SEGMENTS} conversations, the most that are kept; continue from an answer"
                raise ApiError(400, text, TURNS, ["messages"])
            budget = limits.turn(self._tokens, size)
            if budget.tokens <= 0:
                raise self._no_room(budget, size)
            beside = limits.turn(self._tokens + self._reserved, size)
            if beside.tokens >= min(budget.tokens, most or budget.tokens):
                return budget
            self._changed.clear()
            await self._changed.wait()

    def check_size(self, prompt: str | Sequence[Message]) -> None:
        """Raise `ApiError` for a prompt that need not be tokenised to see that it is too long."""
        if fault := size_fault(prompt, self._limits.max_model_len):
            self.ended_as = "context"
            where = "prompt" if isinstance(prompt, str) else "messages"
            raise ApiError(400, f"{where}: what the policy is to read {fault}: shorten it", CONTEXT, [where])

    @contextmanager
    def taken(self, tokens: int) -> Iterator[None]:
        """Reserve tokens while an answer is sampled."""
        self.in_flight += 1
        self._reserved += tokens
        try:
            yield
        finally:
            self.in_flight -= 1
            self._reserved -= tokens
            self._changed.set()

    def spend(self, tokens: int) -> None:
        """Count an answer and its tokens."""
        self._turns += 1
        self._tokens += tokens

    def _no_room(self, budget: TurnBudget, size: int) -> ApiError:
        self.ended_as = budget.ends_as
        limits = self._limits
        if budget.ends_as == "context":
            text = (
                f"This model's maximum context length is {limits.max_model_len} tokens (vllm.max_model_len), and the "
                f"messages with their tools have {size}: shorten them"
            )
        else:
            text = f"the episode has sampled its {limits.max_episode_tokens} tokens (rollout.max_episode_tokens)"
        return ApiError(400, text, CONTEXT, ["messages"])
