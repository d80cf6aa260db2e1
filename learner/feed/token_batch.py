"""Shows one step's sequences as padded tensors, for a trainer of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from slipstream.learner.feed.packing import Sample, changed_tensors


@dataclass(frozen=True)
class TokenBatch:
    """The B sequences of one optimiser step, padded on the right to T tokens. All tensors are on the host.

    A rollout is one sequence, or several where its context was rewritten between turns. Values at `[b, t]` belong to
    `input_ids[b, t]`, which `logits[b, t - 1]` predicts.

    ================== ================ =====================================================================
    field              tensor           what
    ================== ================ =====================================================================
    input_ids          int64 [B, T]     token ids; 0 where padded
    attention_mask     int64 [B, T]     1 for a token, 0 where padded
    trains             bool [B, T]      the tokens to train: sampled, young enough, and not masked
    weights            float32 [B, T]   the token's part in the step's loss by `learner.normaliser`; 0 where it
                                        does not train
    advantages         float32 [B, T]   of the token's rollout by `learner.advantage`; 0 where it does not train
    behaviour          float32 [B, T]   log-prob, in nats, under the weights that sampled the token, at
                                        `rollout.temperature`; 0 where it was not sampled
    teacher            float32 [B, T]   log-prob, in nats, under the teacher; 0 where the token was not sampled; None
                                        without a teacher
    versions           int64 [B, T]     version of the weights that sampled the token; -1 where it does not train
    rewards            float32 [B]      reward of the sequence's rollout
    rollouts           int64 [B]        number of the sequence's rollout in the step
    groups             int64 [B]        number of the sequence's group in the step
    ================== ================ =====================================================================

    Attributes:
        step: The optimiser step that trains the batch, from 1.
        version: The version of the weights before that step, which makes `version + 1`.
        number: Of the batch among those that were given out; one that replaces a skipped batch has another.
    """

    step: int
    version: int
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    trains: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    behaviour: torch.Tensor
    versions: torch.Tensor
    rewards: torch.Tensor
    rollouts: torch.Tensor
    groups: torch.Tensor
    number: int = 0
    teacher: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        step: int,
        version: int,
        samples: Sequence[Sample],
        rewards: npt.NDArray[np.float64],
        advantages: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float64],
        number: int = 0,
    ) -> Self:
        """Pad the sequences of a step.

        Args:
            rewards, advantages, weights: [S], of each rollout; `weights` is the weight of one of its tokens.
            number: As the attribute.
        """

        def padded(values: Sequence[npt.NDArray[Any]], dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([torch.tensor(value, dtype=dtype) for value in values], True, fill)

        rollouts = np.array([sample.rollout for sample in samples], dtype=np.int64)
        trains = padded([sample.weights > 0 for sample in samples], torch.bool)
        taught = [sample.teacher for sample in samples if sample.teacher is not None]
        sampled = [np.where(sample.weights > 0, version - sample.staleness, -1) for sample in samples]
        return cls(
            step=step,
            version=version,
            input_ids=padded([sample.token_ids for sample in samples], torch.int64),
            attention_mask=padded([np.ones(len(sample)) for sample in samples], torch.int64),
            trains=trains,
            weights=trains * torch.from_numpy(weights[rollouts]).float()[:, None],
            advantages=trains * torch.from_numpy(advantages[rollouts])[:, None],
            behaviour=padded([sample.behaviour for sample in samples], torch.float32),
            versions=padded(sampled, torch.int64, fill=-1),
            rewards=torch.from_numpy(rewards[rollouts]).float(),
            rollouts=torch.from_numpy(rollouts),
            groups=torch.tensor([sample.group for sample in samples]),
            number=number,
            teacher=padded(taught, torch.float32) if taught else None,
        )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.input_ids)

    def split(self, size: int) -> Iterator[Self]:
        """Yield parts of at most `size` sequences, each padded to its own longest one.

        Losses of the parts add up to the step's: `weights` are those of the whole step.
        """
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            longest = int(self.attention_mask[rows].sum(1).max())
            yield self._each(partial(_cut, rows=rows, longest=longest))

    def to(self, device: torch.device | str) -> Self:
        """Copy the tensors to a device."""
        return self._each(lambda value: value.to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(self, **changed_tensors(self, change))


def _cut(values: torch.Tensor, rows: slice, longest: int) -> torch.Tensor:
    return values[rows, :longest] if values.dim() == 2 else values[rows]
