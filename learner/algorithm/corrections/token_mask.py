"""`correction = "token_mask"`: IcePop, tokens that sampler and learner disagree on are left out."""

from __future__ import annotations

from typing import ClassVar

from learner.algorithm.corrections.bounded import MaskedWeight


class TokenMask(MaskedWeight):
    """weight = r = proximal / behaviour of each token within [`correction_low`, `correction_high`], and 0 outside.

    IcePop (Ring-1T, arXiv:2510.18855: M(k) = k for k in [alpha, beta], else 0), with its bounds 0.5 and 5; TRL's mode
    `token_mask`.

    Choose it with `reinforce` where sampler and learner disagree on single tokens, as mixtures of experts do (preset
    `icepop`).
    """

    LOW: ClassVar[float] = 0.5
    HIGH: ClassVar[float] = 5.0
