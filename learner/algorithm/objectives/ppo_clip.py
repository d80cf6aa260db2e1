"""`objective = "ppo_clip"`: PPO's clip, against the policy that sampled or the one that a correction names."""

from __future__ import annotations

from learner.algorithm.objectives.clip import ClipObjective


class PpoClip(ClipObjective):
    """PPO's clip of each token's own ratio, r = p / p_old (arXiv:1707.06347, eq. 7).

    Choose it first; it is the best known, and holds staleness of a few versions.
    """
