"""How much better each rollout of a group did than its siblings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def has_variance(rewards: npt.NDArray[np.float64]) -> bool:
    """Whether the rewards of a group differ at all: without that there is nothing to learn from it."""
    return bool(np.ptp(rewards) > 0)


def group_advantages(rewards: npt.NDArray[np.float64], epsilon: float) -> npt.NDArray[np.float32]:
    """GRPO's (r - mean) / (std + epsilon), over one group (arXiv:2402.03300, eq. 3).

    rewards: float64 [G]; returns float32 [G]. The standard deviation is the sample's (divided by G - 1), as in TRL,
    which takes `torch.std`. A group without variance has advantages of exactly 0.
    """
    if not has_variance(rewards):
        return np.zeros(len(rewards), dtype=np.float32)
    centred = rewards - rewards.mean()
    scale = float(rewards.std(ddof=1)) + epsilon
    return np.asarray(centred / scale, dtype=np.float32)
