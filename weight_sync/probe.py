"""The proof of a publication: log-probs of a fixed token sequence, the learner's beside the server's.

A checksum proves that bytes arrived; only the log-probs prove that the server computes with them (on a CPU, vLLM
keeps packed copies that a reload may leave behind).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Probe:
    """token_ids: T ids; logprobs: float32 [T-1], log p(token_ids[i + 1] | token_ids[:i + 1]) at temperature 1,
    by the weights that are being published."""

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]

    def max_abs_diff(self, served: npt.NDArray[np.float32]) -> float:
        """Largest difference to the server's log-probs [T-1]; infinite where they are missing or not numbers."""
        if served.shape != self.logprobs.shape or not np.isfinite(served).all():
            return float("inf")
        return float(np.abs(served - self.logprobs).max())


def probe_token_ids(vocab_size: int, length: int = 64, seed: int = 0) -> list[int]:
    """A fixed sequence that touches ids all over the vocabulary."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab_size, length)]
