"""`correction = "none"`: the objective's ratio is to the policy that sampled."""

from __future__ import annotations

from learner.algorithm.corrections.base import Corrected, Correction
from learner.algorithm.step_data import Tokens


class NoCorrection(Correction):
    """Nothing: p / p_behaviour is in the objective, which bounds it.

    Choose it for staleness of 0 or 1, and with objectives that bound their ratio.
    """

    def __call__(self, tokens: Tokens) -> Corrected:
        return Corrected(tokens, {})
