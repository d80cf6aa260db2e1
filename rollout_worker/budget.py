"""The context budget: how many tokens a turn may sample, and what an episode ends as when there are none left."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, Self

from protocol.config import RunConfig


@dataclass(frozen=True, slots=True)
class TurnBudget:
    """`tokens` that the next turn may sample, 0 or less if the episode is over; `ends_as`: the finish reason of an
    episode that used them up."""

    tokens: int
    ends_as: Literal["length", "context"]


@dataclass(frozen=True, slots=True)
class Limits:
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
