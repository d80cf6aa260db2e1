"""The proof of a publication: log-probs of a fixed token sequence, the learner's against the server's.

A digest proves that bytes arrived. Only log-probs prove that the server computes with them: on a CPU, vLLM computes
with packed copies, which a reload may miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Probe:
    """token_ids: T ids. logprobs: float32 [T-1], where logprobs[i] = log p(token_ids[i + 1] | token_ids[:i + 1]) in
    nats, at temperature 1, by the weights that are published."""

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]

    def max_abs_diff(self, served: npt.NDArray[np.float32]) -> float:
        """Largest difference to the server's log-probs, float32 [T-1]; infinite if some are missing or not finite."""
        if served.shape != self.logprobs.shape or not np.isfinite(served).all():
            return float("inf")
        return float(np.abs(served - self.logprobs).max())


def probe_token_ids(vocab_size: int, length: int = 64, seed: int = 0) -> list[int]:
    """`length` ids drawn from the whole vocabulary, the same at every call."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab_size, length)]
