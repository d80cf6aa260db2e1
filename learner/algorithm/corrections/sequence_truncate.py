"""`correction = "sequence_truncate"`: truncated importance sampling, of whole rollouts."""

from __future__ import annotations

from typing import ClassVar

from learner.algorithm.corrections.bounded import TruncatedWeight


class SequenceTruncate(TruncatedWeight):
    """weight = clip(exp(sum of log proximal - log behaviour), `correction_low`, `correction_high`), over a rollout's
    tokens that train, the same for all of them.

    TRL's mode `sequence_truncate` with its upper bound, 3. Without a bound it is unbiased, with a variance that grows
    with the rollout's length (richardli.xyz/post/rl-collapse-part2, analysis 1).

    Choose it for short rollouts, where a weight of the whole rollout is less biased than one of tokens.
    """

    by_rollout: ClassVar[bool] = True
    HIGH: ClassVar[float] = 3.0
