"""Objectives: what an optimiser step maximises, as small pure functions of tokens."""

from learner.algorithm.objectives.base import Objective, TokenLosses, Tokens
from learner.algorithm.objectives.ppo_clip import Grpo

__all__ = ["Grpo", "Objective", "TokenLosses", "Tokens"]
