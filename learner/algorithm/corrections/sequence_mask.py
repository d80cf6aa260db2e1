"""`correction = "sequence_mask"`: rollouts that have become too likely or too unlikely are left out."""

from __future__ import annotations

from typing import ClassVar

from learner.algorithm.corrections.bounded import MaskedWeight


class SequenceMask(MaskedWeight):
    """weight = r = exp(sum of log proximal - log behaviour) over a rollout's tokens that train, the same for all of
    them; 0 where r is outside of [`correction_low`, `correction_high`].

    TRL's mode `sequence_mask`, its default, with its upper bound, 3, and no lower one. r moves away from 1 with each
    token: long rollouts are left out more often than short ones.

    Choose it to compare with TRL's GRPOTrainer, and for fresh data of a server that rounds otherwise.
    """

    by_rollout: ClassVar[bool] = True
    HIGH: ClassVar[float] = 3.0
