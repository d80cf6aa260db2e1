"""`correction = "decoupled"`: decoupled PPO, one policy to clip against and another one to correct for."""

from __future__ import annotations

from typing import ClassVar

from learner.algorithm.corrections.bounded import TruncatedWeight


class Decoupled(TruncatedWeight):
    """Decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, section 5.2): the objective clips p / proximal, and
    each token is weighted by min(proximal / behaviour, `correction_high`).

    The paper has no bound; 5 is that of AReaL's code, `behav_imp_weight_cap`, which leaves such tokens out (that is
    `token_mask` with `correction_low = 0`). The formula is `token_truncate`'s, under the name that people know: what
    makes it PPO is `proximal`. With `recomputed`, p / proximal is 1 throughout, as a batch makes one optimiser step,
    and the clip never acts; `last_step` and `interpolated` (A-3PO) give it something to hold on to.

    Choose it for staleness above 1 with `proximal = "interpolated"`, which costs nothing, or `"last_step"`.
    """

    HIGH: ClassVar[float] = 5.0
