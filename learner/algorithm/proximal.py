"""The proximal policy: one between the policy that sampled and the one that trains, which corrections weigh by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Between:
    """What a proximal policy is made from, for N tokens, without a gradient: log-probs under the policy that sampled
    (behaviour), as the step begins (logprobs), and before the last optimiser step (previous; None where that is not
    known), each float32 [N]; staleness, int32 [N], versions between sampling and training."""

    behaviour: torch.Tensor
    logprobs: torch.Tensor
    previous: torch.Tensor | None
    staleness: torch.Tensor


def recomputed(between: Between) -> torch.Tensor:
    """The policy as the step begins, AReaL's and verl's `recompute` (arXiv:2505.24298, section 5.2).

    They need a pass for it, since they make several optimiser steps with a batch. Here a batch makes one: it is the
    policy that trains, without its gradient, and costs nothing.

    Choose it with weights and masks, which then compare with the policy itself.
    """
    return between.logprobs


def last_step(between: Between) -> torch.Tensor:
    """The policy before the last optimiser step; before the first one since the learner started, the policy itself.

    Choose it with `decoupled`, for the paper's own formula, at the price of a pass.
    """
    return between.logprobs if between.previous is None else between.previous


def interpolated(between: Between) -> torch.Tensor:
    """log proximal = alpha log behaviour + (1 - alpha) log policy, alpha = 1 / d for a token that is d versions old,
    and 1 where d = 0: A-3PO (arXiv:2512.06547), as AReaL computes it (`prox_logp_method = "loglinear"`), where the
    proximal policy is one version behind the one that trains.

    Choose it with `decoupled`, for nearly the same without a pass.
    """
    alpha = 1 / between.staleness.clamp(min=1)
    return torch.lerp(between.behaviour, between.logprobs, 1 - alpha)


# By `learner.proximal`: log-probs under the proximal policy, float32 [N].
PROXIMALS: dict[str, Callable[[Between], torch.Tensor]] = {
    "recomputed": recomputed,
    "last_step": last_step,
    "interpolated": interpolated,
}
