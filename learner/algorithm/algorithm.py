"""Puts the parts of an algorithm together: from a step's rollouts to advantages, and from a row's tokens to losses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from slipstream.learner.algorithm import advantages, corrections, loss_terms, objectives
from slipstream.learner.algorithm.corrections import PROXIMALS
from slipstream.learner.algorithm.objectives import TokenLosses
from slipstream.learner.algorithm.step_data import NORMALISERS, Floats, StepRollouts, Tokens
from slipstream.protocol.config import LearnerSection


class Algorithm:
    """The algorithm that `[learner]` chose.

    Args:
        section: `[learner]` of the run file.
        longest: Maximum number of tokens that a rollout may sample.
        teacher_coef: Weight of the teacher's advantage.

    Attributes:
        by_rollout: Whether losses depend on what `Tokens` has of whole rollouts.
        proximal: Makes the log-probs of the proximal policy.
        needs_previous: Whether `proximal` is the policy before the last step.
        top_entropy: The share of the step's tokens, those of highest entropy, that are learnt from; None for all.
        needs_reference: Whether anything reads `Tokens.reference`.
        kl_in_reward: Whether advantages need the reference's log-probs.
        needs_entropy: Whether the loss holds the step's mean entropy.
    """

    def __init__(self, section: LearnerSection, longest: int, teacher_coef: float = 1.0) -> None:
        self._advantage = advantages.build(section)
        self._correction = corrections.build(section)
        self._masks = loss_terms.build_masks(section)
        self._objective = objectives.build(section)
        self._regularisers = loss_terms.build_regularisers(section)
        self._normaliser = NORMALISERS[section.normaliser]
        self._longest = longest
        self._teacher_coef = teacher_coef
        self.by_rollout = (
            self._objective.by_rollout
            or self._correction.by_rollout
            or any(mask.by_rollout for mask in self._masks.values())
        )
        self.proximal = PROXIMALS[section.proximal]
        self.needs_previous = section.proximal == "last_step"
        self.top_entropy = section.top_entropy_quantile if section.top_entropy_quantile < 1 else None
        self.needs_reference = any(of.needs_reference for of in self._regularisers)
        self.kl_in_reward = any(of.in_reward for of in self._regularisers)
        self.needs_entropy, self._entropy_coef = section.entropy_coef > 0, section.entropy_coef

    def advantages(self, rollouts: StepRollouts, reference_drift: Floats | None = None) -> npt.NDArray[np.float32]:
        """Compute the advantages of a step.

        Args:
            reference_drift: float64 [S], sum of reference - behaviour over each rollout's tokens that train; given
                where `kl_in_reward`.

        Returns:
            float32 [S].
        """
        for regulariser in self._regularisers:
            if regulariser.in_reward and reference_drift is not None:
                rollouts = rollouts.with_rewards(rollouts.rewards - regulariser.penalties(reference_drift))
        return self._advantage(rollouts)

    def weights(self, rollouts: StepRollouts) -> npt.NDArray[np.float32]:
        """Return the weight of each rollout's tokens in the step's loss, float32 [S]."""
        return self._normaliser(rollouts, self._longest).astype(np.float32)

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """Compute the losses of a row's tokens, with the sums and peaks of all parts.

        A teacher adds coef * (log teacher - log policy) to each token's advantage: a sample of minus the reverse KL
        (on-policy distillation: arXiv:2306.13649, with the policy's own samples). Where the teacher's likeliest ids are
        known, coef * sum of teacher * (log teacher - log policy) over them is added to each token's loss instead: the
        forward KL.
        """
        apart: dict[str, torch.Tensor] = {}
        forward_kl: torch.Tensor | None = None
        if tokens.teacher_top is not None and tokens.others is not None:
            forward_kl = (tokens.teacher_top.exp() * (tokens.teacher_top - tokens.others)).sum(1)
            apart = {_TEACHER_KL: torch.where(tokens.weights > 0, forward_kl.detach(), 0.0).sum()}
        elif tokens.teacher is not None:
            closer = tokens.teacher - tokens.logprobs.detach()
            apart = {_TEACHER_KL: -torch.where(tokens.weights > 0, closer, 0.0).sum()}
            tokens = tokens.but(advantages=tokens.advantages + self._teacher_coef * closer)
        corrected = self._correction(tokens)
        seen, weighted = corrected.tokens, tokens.weights > 0
        masked: dict[str, torch.Tensor] = {}
        for name, mask in self._masks.items():
            keep = mask(tokens)
            seen = seen.masked(keep)
            masked[f"{_MASKED}{name}"] = (weighted & ~keep).sum()
        result = self._objective(seen)
        losses, added_sums = result.losses, dict[str, torch.Tensor]()
        counts = {"corrected": weighted.sum(), "tokens": (seen.weights > 0).sum()}
        if forward_kl is not None:
            losses = losses + self._teacher_coef * tokens.weights * forward_kl
        for regulariser in self._regularisers:
            if isinstance(regulariser, loss_terms.EntropyBonus):  # the last one
                counts["policy_loss"] = losses.detach().sum()
            added = regulariser(tokens)
            losses = losses + added.losses
            added_sums |= _named(_REGULARISER, added.sums)
        own, before = _named(_OBJECTIVE, result.sums), _named(_CORRECTION, corrected.sums)
        drift = _named(_DRIFT, self._objective.drift(tokens))
        peaks = {**_named(_OBJECTIVE, result.peaks), **_named(_CORRECTION, corrected.peaks)}
        return TokenLosses(losses, {**counts, **apart, **own, **drift, **before, **masked, **added_sums}, peaks)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float | None]:
        """Make the metrics of `metrics.jsonl` from a step's sums and peaks. The objective's are None where correction
        and masks left it no token."""
        corrected, tokens = max(1, int(sums["corrected"])), int(sums["tokens"])
        own = _under(_OBJECTIVE, sums)
        if tokens:
            shown: dict[str, float | None] = {**self._objective.metrics(own, tokens)}
        else:
            shown = dict.fromkeys(self._objective.metrics(dict.fromkeys(own, 1.0), 1))
        if self.needs_entropy:
            shown |= {"policy_loss": sums["policy_loss"], "entropy_coef": self._entropy_coef}
        if _TEACHER_KL in sums:
            shown[_TEACHER_KL] = sums[_TEACHER_KL] / corrected
        return {
            **self._correction.metrics(_under(_CORRECTION, sums), corrected),
            **{name: value / corrected for name, value in sums.items() if name.startswith(_MASKED)},
            **shown,
            **self._objective.drift_metrics(_under(_DRIFT, sums), corrected),
            **{name: value / corrected for name, value in _under(_REGULARISER, sums).items()},
        }


_OBJECTIVE, _DRIFT, _CORRECTION, _REGULARISER = "objective ", "drift ", "correction ", "regulariser "
_MASKED = "masked/"
_TEACHER_KL = "teacher/kl"


def _named(prefix: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _under(prefix: str, sums: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
