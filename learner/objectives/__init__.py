"""Objectives: what an optimiser step maximises, as small pure functions of tokens."""

from learner.objectives.base import Objective, TokenLosses, Tokens
from learner.objectives.grpo import Grpo

__all__ = ["Grpo", "Objective", "TokenLosses", "Tokens"]
