"""The probe of a publication: ids that move over the vocabulary, and the learner's log-probs of them.

A digest proves that bytes arrived. Only log-probs prove that the server computes with them: on a CPU, vLLM computes
with packed copies, which a reload may miss. A probe sees the rows of the embedding and of the head that it touches, so
each publication has another one, and together they touch all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LENGTH = 64


@dataclass(frozen=True)
class Probe:
    """token_ids: T ids. logprobs: float32 [T-1], where logprobs[i] = log p(token_ids[i + 1] | token_ids[:i + 1]) in
    nats, at temperature 1, by the weights that are published."""

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]


def probe_token_ids(vocab_size: int, number: int = 0, seed: int = 0, length: int = LENGTH) -> list[int]:
    """The `length` ids of publication `number`, the same at every call.

    Windows over a permutation of the vocabulary, each of which begins with the last id of the one before: `rounds` of
    them in a row hold each id both as an input and as one that is predicted. The next round is permuted anew.
    """
    windows = rounds(vocab_size, length)
    number, place = divmod(number, windows)
    ids = np.random.default_rng((seed, number)).permutation(vocab_size)
    chosen = (np.arange(length) + place * (length - 1)) % vocab_size
    return [int(token) for token in ids[chosen]]


def rounds(vocab_size: int, length: int = LENGTH) -> int:
    """Publications in a row that touch every id."""
    return max(1, -(-vocab_size // (length - 1)))
