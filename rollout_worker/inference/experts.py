"""Joins the experts of a mixture that servers recorded for tokens, for a segment.

A server tells them for each token that it computed, so for all of a turn but the last token sampled. That one is
computed at the next turn, whose answer has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.protocol.messages import RoutedExperts

Ids = npt.NDArray[np.unsignedinteger[Any]]


class RecordedExperts(NamedTuple):
    """Experts of a segment's tokens from `start` on.

    Attributes:
        ids: uint8 or uint16 [n, layers, top_k].
    """

    start: int
    ids: Ids

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


def known_until(recorded: Sequence[RecordedExperts]) -> int:
    """Return how many of a segment's first tokens have experts."""
    return recorded[-1].end if recorded else 0


def joined(recorded: Sequence[RecordedExperts]) -> RoutedExperts | None:
    """Join what was recorded of a segment; None for nothing, or for experts of several models."""
    if not recorded:
        return None
    shapes = {each.ids.shape[1:] for each in recorded}
    if len(shapes) > 1:
        return None
    ((layers, top_k),) = shapes
    spans: list[tuple[int, int]] = []
    for each in recorded:
        if spans and spans[-1][1] == each.start:
            spans[-1] = (spans[-1][0], each.end)
        else:
            spans.append((each.start, each.end))
    return RoutedExperts(np.concatenate([each.ids for each in recorded]).reshape(-1), layers, top_k, spans)
