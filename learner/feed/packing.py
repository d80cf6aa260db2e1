"""Sequences packed into rows of at most `token_budget` tokens, without padding.

Packing must not change what is learnt: each row carries the bounds of its sequences, attention stays within them,
and the loss is a sum over tokens with one normaliser for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Sample:
    """One token sequence to train on.

    token_ids: int32 [T]; sampled: bool [T]; behaviour: float32 [T], log-probs under the policy that sampled;
    weights: float32 [T], loss weights, 0 for the first token and where not sampled; staleness: int32 [T], versions
    between sampling and training; advantage: its rollout's.
    """

    token_ids: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.bool_]
    behaviour: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    staleness: npt.NDArray[np.int32]
    advantage: float

    def __len__(self) -> int:
        return len(self.token_ids)

    def trimmed(self) -> Sample:
        """Without what follows the last token with weight: attention is causal, so nothing there matters."""
        end = int(np.flatnonzero(self.weights)[-1]) + 1
        return Sample(
            self.token_ids[:end],
            self.sampled[:end],
            self.behaviour[:end],
            self.weights[:end],
            self.staleness[:end],
            self.advantage,
        )


@dataclass(frozen=True)
class PackedRow:
    """Several sequences end to end, longest first, and the sampled tokens in them.

    input_ids, position_ids: int64 [1, T]; cu_seqlens: int32 [n + 1], where each sequence starts, and T; max_seqlen:
    length of the longest. For each of the N sampled tokens: positions, int64 [N], index in the row of the token
    *before* it, whose output predicts it; targets, int64 [N], its id; behaviour, advantages, weights, float32 [N];
    staleness, int32 [N].
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    positions: torch.Tensor
    targets: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    staleness: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


def pack(samples: Sequence[Sample], token_budget: int) -> list[PackedRow]:
    """Rows of at most `token_budget` tokens that hold every sample once; raises `ValueError` if one is longer."""
    bins = assign([len(sample) for sample in samples], token_budget)
    return [pack_row([samples[i] for i in members]) for members in bins]


def assign(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Best-fit decreasing: indices of `lengths` by row, each row's longest first.

    Best fit rather than first fit, because it leaves large gaps whole; at most 11/9 of the fewest rows, plus one.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > token_budget:
            raise ValueError(
                f"a sequence of {length} tokens does not fit learner.token_budget = {token_budget}: raise it to at "
                f"least {length}, or lower rollout.max_episode_tokens"
            )
        fitting = [(room[b], b) for b in range(len(bins)) if room[b] >= length]
        if fitting:
            _, best = min(fitting)
        else:
            best = len(bins)
            bins.append([])
            room.append(token_budget)
        bins[best].append(index)
        room[best] -= length
    return bins


def pack_row(samples: Sequence[Sample]) -> PackedRow:
    """One row of `samples`, in their order."""
    lengths = np.array([len(sample) for sample in samples])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    targets = np.concatenate([_predicted(sample) + start for sample, start in zip(samples, starts, strict=False)])
    token_ids = np.concatenate([sample.token_ids for sample in samples]).astype(np.int64)
    behaviour = np.concatenate([sample.behaviour for sample in samples])
    weights = np.concatenate([sample.weights for sample in samples])
    staleness = np.concatenate([sample.staleness for sample in samples])
    advantages = np.repeat(np.array([sample.advantage for sample in samples], dtype=np.float32), lengths)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return PackedRow(
        input_ids=torch.from_numpy(token_ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        positions=torch.from_numpy(targets - 1),
        targets=torch.from_numpy(token_ids[targets]),
        behaviour=torch.from_numpy(behaviour[targets]),
        advantages=torch.from_numpy(advantages[targets]),
        weights=torch.from_numpy(weights[targets]),
        staleness=torch.from_numpy(staleness[targets]),
    )


def _predicted(sample: Sample) -> npt.NDArray[np.int64]:
    """Indices of the sampled tokens that follow another token."""
    return np.flatnonzero(sample.sampled[1:]) + 1
