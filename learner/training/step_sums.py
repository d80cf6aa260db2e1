"""Sums and peaks over the rows of a step, kept on their device, and what a step that diverged shows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def why_diverged(loss: float, grad_norm: float, metrics: Mapping[str, float]) -> str:
    """Say which value is not finite, the metrics that show where it went wrong, and what to change."""
    if math.isfinite(metrics["log_ratio_max"]):
        remedy = (
            "lower learner.learning_rate; where log_ratio_max is above 3, the policy is far from the one that sampled: "
            "lower queue.max_staleness, too"
        )
    else:
        remedy = "the policy's own log-probs are not finite: set model.dtype = float32, or lower learner.learning_rate"
    shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    return (
        f"the step's loss is {loss:.4g} and its gradient's norm {grad_norm:.4g} ({shown}); no weight was "
        f"changed: {remedy}"
    )


def sampler_kl(log_ratios: torch.Tensor, fresh: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return sums for KL(sampler, learner): the mean of -log r over the fresh tokens, where r = p / p of the sampler
    (k1 of joschu.net/blog/kl-approx.html).

    Not k3, r - 1 - log r: the mean of r - 1 is 0 only where the sampler may take every token. With top_p it may not,
    and k3 shows a fraction of the difference.

    Args:
        log_ratios: float32 [N].
        fresh: bool [N], the tokens that the learner's own version sampled.
    """
    return {"kl": -torch.where(fresh, log_ratios, 0.0).sum(), "fresh": fresh.sum()}


def add(total: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    """Add scalars by name on their device, so no row waits for another's."""
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value


def raise_to(peaks: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    """Keep the greatest scalar by name on its device, so no row waits for another's."""
    for name, value in more.items():
        peaks[name] = torch.maximum(peaks[name], value) if name in peaks else value
