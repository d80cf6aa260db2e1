"""Reads the experts of a mixture that vLLM recorded for tokens (`--enable-return-routed-experts`), and joins them for a
segment.

vLLM tells them for each token that it computed, so for all of a turn but the last token sampled: that one is computed
at the next turn, whose answer has it.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.protocol import reasons
from slipstream.protocol.messages import RoutedExperts
from slipstream.rollout_worker.inference.failures import BadSample

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


def recorded_experts(text: str | None, start: int, prompt: int, sampled: int) -> list[RecordedExperts]:
    """Read vLLM's answer: an array of numpy in base64.

    Args:
        text: The answer; None from a server that records none.
        start: First token of which experts were asked for.
        prompt: Tokens of the request's prompt.
        sampled: Tokens that were sampled after it.

    Returns:
        One entry. None if the server told nothing, or not of every token, so that it cannot be known of which.

    Raises:
        BadSample: BAD_EXPERTS, it is no such array.
    """
    if text is None:
        return []
    try:
        ids = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError, binascii.Error) as error:
        raise BadSample(reasons.BAD_EXPERTS, f"routed_experts is no array: {error}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 3 or ids.dtype not in (np.uint8, np.uint16) or not ids[:1].size:
        shown = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise BadSample(reasons.BAD_EXPERTS, f"routed_experts is {shown}, not [tokens, layers, choices] of small ids")
    return [RecordedExperts(start, ids)] if len(ids) == prompt + sampled - 1 - start else []


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
