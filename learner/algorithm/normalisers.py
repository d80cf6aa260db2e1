"""What the losses of a step's tokens are divided by, of which there is one for the whole step: so neither packing nor
micro-batches can change the gradient. Tokens that do not train never count; a rollout without one that trains counts
as a rollout, as its reward does in its group: where much is masked, a step is smaller."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from learner.algorithm.rollouts import Floats, StepRollouts


def tokens(rollouts: StepRollouts, longest: int) -> Floats:
    """One over the step's tokens: every token counts alike (DAPO, arXiv:2503.14476, eq. 8; TRL's `dapo`, and its `bnpo`
    where the whole step is one batch).

    Choose it first.
    """
    return np.full(len(rollouts), 1 / rollouts.tokens.sum())


def sequences(rollouts: StepRollouts, longest: int) -> Floats:
    """Each rollout's mean over its tokens, and the mean over the rollouts (GRPO, arXiv:2402.03300, eq. 3; TRL's
    `grpo`).

    Choose it where long answers must not outweigh short ones, and with `gspo`.
    """
    return 1 / (np.maximum(rollouts.tokens, 1) * len(rollouts))


def constant(rollouts: StepRollouts, longest: int) -> Floats:
    """One over rollouts times the greatest length: no length is favoured (Dr. GRPO, arXiv:2503.20783, section 3.2;
    TRL's `dr_grpo`).

    Choose it with `dr_grpo`, where answers grow longer without growing better.
    """
    return np.full(len(rollouts), 1 / (len(rollouts) * longest))


def rollouts(rollouts: StepRollouts, longest: int) -> Floats:
    """One over the rollouts: the sum over a rollout's tokens, and the mean over the rollouts (LUSPO, arXiv:2602.05261;
    TRL's `luspo`, and its RLOOTrainer).

    Choose it with `sequence_clip`, whose losses are of whole rollouts.
    """
    return np.full(len(rollouts), 1 / len(rollouts))


# By `learner.normaliser`: from a step's rollouts and the most tokens that one may sample, the weight of a token in the
# step's loss, float64 [S], by rollout.
NORMALISERS: dict[str, Callable[[StepRollouts, int], Floats]] = {
    "tokens": tokens,
    "sequences": sequences,
    "constant": constant,
    "rollouts": rollouts,
}
