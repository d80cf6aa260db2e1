"""Reads the experts that servers recorded for a segment's tokens, as the policy's routers take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.protocol.messages import Segment


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of the policy that choose experts.

    Attributes:
        layers: Their numbers among all layers, ascending.
        experts: How many each has.
        top_k: How many it chooses for a token.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int

    def of(self, segment: Segment) -> npt.NDArray[np.int16] | None:
        """Return the experts that were recorded for a segment's tokens, int16 [T, layers, top_k], -1 where none were.
        None if there are none, or if they are another model's."""
        recorded = segment.experts
        if recorded is None or recorded.top_k != self.top_k or recorded.layers <= self.layers[-1]:
            return None
        chosen = recorded.by_token()[:, list(self.layers)]
        if not len(chosen) or int(chosen.max()) >= self.experts:
            return None
        found = np.full((len(segment.token_ids), len(self.layers), self.top_k), -1, dtype=np.int16)
        begin = 0
        for start, end in recorded.spans:
            found[start:end] = chosen[begin : begin + end - start]
            begin += end - start
        return found
