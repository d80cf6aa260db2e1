"""All parts of an algorithm as one: from a step's rollouts to advantages, and from a row's tokens to losses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from learner.algorithm import advantages, corrections, objectives
from learner.algorithm.normalisers import NORMALISERS
from learner.algorithm.objectives.base import TokenLosses
from learner.algorithm.rollouts import StepRollouts
from learner.algorithm.tokens import Tokens
from protocol.config import LearnerSection


class Algorithm:
    """What `[learner]` chose. `longest`: the most tokens that a rollout may sample.

    by_rollout: whether losses depend on what `Tokens` has of whole rollouts.
    """

    def __init__(self, section: LearnerSection, longest: int) -> None:
        self._advantage = advantages.build(section)
        self._correction = corrections.build(section)
        self._objective = objectives.build(section)
        self._normaliser = NORMALISERS[section.normaliser]
        self._longest = longest
        self.by_rollout = self._objective.by_rollout or self._correction.by_rollout

    def advantages(self, rollouts: StepRollouts) -> npt.NDArray[np.float32]:
        """float32 [S]"""
        return self._advantage(rollouts)

    def weights(self, rollouts: StepRollouts) -> npt.NDArray[np.float32]:
        """Weight of each rollout's tokens in the step's loss, float32 [S]."""
        return self._normaliser(rollouts, self._longest).astype(np.float32)

    def __call__(self, tokens: Tokens) -> TokenLosses:
        corrected = self._correction(tokens)
        result = self._objective(corrected.tokens)
        counts = {"corrected": (tokens.weights > 0).sum(), "tokens": (corrected.tokens.weights > 0).sum()}
        own = {f"{_OBJECTIVE}{name}": value for name, value in result.sums.items()}
        before = {f"{_CORRECTION}{name}": value for name, value in corrected.sums.items()}
        return TokenLosses(result.losses, {**counts, **own, **before})

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """What `metrics.jsonl` shows, from a step's sums."""
        own = _under(_OBJECTIVE, sums)
        before = _under(_CORRECTION, sums)
        return {
            **self._correction.figures(before, max(1, int(sums["corrected"]))),
            **self._objective.figures(own, max(1, int(sums["tokens"]))),
        }


_OBJECTIVE, _CORRECTION = "objective ", "correction "


def _under(prefix: str, sums: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
