"""Conversations to learn from, as token ids: a worker's chat format renders them, and the learner trains on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TaughtSegment:
    """A token sequence as an episode would have recorded it.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T], the tokens that the assistant wrote and that are learnt; at least one.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Demonstration:
    """One conversation to learn from. It has several segments where its context is rendered again.

    Attributes:
        row: Number of its row in the data, from 1.
    """

    row: int
    segments: list[TaughtSegment]
