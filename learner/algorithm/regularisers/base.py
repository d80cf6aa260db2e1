"""The face of a regulariser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from learner.algorithm.objectives.base import TokenLosses
from learner.algorithm.rollouts import Floats
from learner.algorithm.step_data import Tokens
from protocol.config import LearnerSection


class Regulariser(ABC):
    """A term of the loss beside the objective's: a pure function of tokens, as they are before any correction. It
    reads its own settings from `section`.

    needs_reference: whether it reads `Tokens.reference`; in_reward: whether it takes `penalties` from the rewards.
    """

    needs_reference: ClassVar[bool] = False
    in_reward: ClassVar[bool] = False

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @abstractmethod
    def __call__(self, tokens: Tokens) -> TokenLosses:
        """What is added to the objective's losses; its sums become figures, as means over the tokens with weight."""

    def penalties(self, reference_drift: Floats) -> Floats:
        """What is taken from each rollout's reward, float64 [S]. `reference_drift`: float64 [S], the sum of reference -
        behaviour over the rollout's tokens that train."""
        raise NotImplementedError
