"""`correction = "token_truncate"`: truncated importance sampling (TIS), token by token."""

from __future__ import annotations

from typing import ClassVar

from learner.algorithm.corrections.bounded import TruncatedWeight


class TokenTruncate(TruncatedWeight):
    """weight = clip(proximal / behaviour, `correction_low`, `correction_high`), of each token.

    TIS bounds it above only, usually at 2 (Yao et al., fengyao.notion.site/off-policy-rl). TRL's mode `token_truncate`
    has a lower bound too, `vllm_importance_sampling_clip_min`, and 3 for the upper one.

    Choose it with `reinforce` for stale data (preset `tis`): every token teaches, none decides.
    """

    HIGH: ClassVar[float] = 2.0
