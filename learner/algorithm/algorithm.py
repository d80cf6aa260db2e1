"""All parts of an algorithm as one: from a step's rollouts to advantages, and from a row's tokens to losses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithm import advantages, corrections, objectives, regularisers
from learner.algorithm.normalisers import NORMALISERS
from learner.algorithm.objectives.base import TokenLosses
from learner.algorithm.rollouts import Floats, StepRollouts
from learner.algorithm.tokens import Tokens
from protocol.config import LearnerSection


class Algorithm:
    """What `[learner]` chose. `longest`: the most tokens that a rollout may sample.

    by_rollout: whether losses depend on what `Tokens` has of whole rollouts; needs_reference: whether anything reads
    `Tokens.reference`; kl_in_reward: whether advantages wait for the reference's log-probs; needs_entropy: whether the
    loss holds the step's mean entropy.
    """

    def __init__(self, section: LearnerSection, longest: int) -> None:
        self._advantage = advantages.build(section)
        self._correction = corrections.build(section)
        self._objective = objectives.build(section)
        self._regularisers = regularisers.build(section)
        self._normaliser = NORMALISERS[section.normaliser]
        self._longest = longest
        self.by_rollout = self._objective.by_rollout or self._correction.by_rollout
        self.needs_reference = any(of.needs_reference for of in self._regularisers)
        self.kl_in_reward = any(of.in_reward for of in self._regularisers)
        self.needs_entropy = section.entropy_coef > 0

    def advantages(self, rollouts: StepRollouts, reference_drift: Floats | None = None) -> npt.NDArray[np.float32]:
        """float32 [S]. `reference_drift`: where `kl_in_reward`, float64 [S], the sum of reference - behaviour over each
        rollout's tokens that train."""
        for regulariser in self._regularisers:
            if regulariser.in_reward and reference_drift is not None:
                rollouts = rollouts.with_rewards(rollouts.rewards - regulariser.penalties(reference_drift))
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
        losses, beside = result.losses, dict[str, torch.Tensor]()
        for regulariser in self._regularisers:
            added = regulariser(tokens)
            losses = losses + added.losses
            beside |= {f"{_REGULARISER}{name}": value for name, value in added.sums.items()}
        return TokenLosses(losses, {**counts, **own, **before, **beside})

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """What `metrics.jsonl` shows, from a step's sums."""
        own = _under(_OBJECTIVE, sums)
        before = _under(_CORRECTION, sums)
        tokens = max(1, int(sums["corrected"]))
        return {
            **self._correction.figures(before, tokens),
            **self._objective.figures(own, max(1, int(sums["tokens"]))),
            **{name: value / tokens for name, value in _under(_REGULARISER, sums).items()},
        }


_OBJECTIVE, _CORRECTION, _REGULARISER = "objective ", "correction ", "regulariser "


def _under(prefix: str, sums: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
