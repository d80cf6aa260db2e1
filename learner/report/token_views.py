"""Adds to the rollouts that people read what there is to know of each of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.learner.feed.step_draft import Batch, SampledTokens
from slipstream.learner.training.base import Scores
from slipstream.protocol.messages import Segment
from slipstream.protocol.rollouts import RolloutView, TokenView

# Tokens of a rollout that are shown: the first and the last half of them.
MAX_TOKENS = 1000

# Tokens of a prompt that are shown: its end. The messages have it whole.
MAX_PROMPT = 32

Texts = Callable[[Sequence[int]], Sequence[str]]


def with_tokens(batch: Batch, scores: Mapping[int, Scores], texts: Texts) -> list[RolloutView]:
    """Return the batch's rollouts to read, with their tokens.

    Args:
        scores: The learner's log-probs in the step, by the rollout's number in it. Some may be missing.
        texts: Returns the text of each of some token ids.
    """
    shown = [
        msgspec.structs.replace(view, tokens=_views(of, scores.get(of.rollout), texts))
        for view, of in zip(batch.samples, batch.sampled, strict=False)
    ]
    return [*shown, *batch.samples[len(shown) :]]


def _views(of: SampledTokens, scores: Scores | None, texts: Texts) -> list[TokenView]:
    found: list[TokenView] = []
    for number, (segment, weights) in enumerate(zip(of.segments, of.weights, strict=True)):
        advantages = None if of.advantages is None else of.advantages[number]
        trained = weights != 0
        learner = _aligned(segment.logprobs[trained], scores)
        found += _of_segment(segment, trained, learner, advantages, texts)
    return _ends(found)


def _of_segment(
    segment: Segment,
    trained: npt.NDArray[np.bool_],
    learner: npt.NDArray[np.float32] | None,
    advantages: npt.NDArray[np.float32] | None,
    texts: Texts,
) -> Iterable[TokenView]:
    count = len(segment.token_ids)
    of_learner: list[float | None] = [None] * count
    if learner is not None:
        for place, value in zip(np.flatnonzero(trained), learner, strict=True):
            of_learner[place] = round(float(value), 4)
    versions: list[int | None] = [None] * count
    for span in segment.version_spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    first = max(0, int(np.argmax(segment.loss_mask)) - MAX_PROMPT)
    if first:
        yield _left_out(first)
    for place, text in enumerate(texts(segment.token_ids[first:].tolist()), first):
        sampled = bool(segment.loss_mask[place])
        logprob = round(float(segment.logprobs[place]), 4) if sampled else None
        version = versions[place] if sampled else None
        advantage = round(float(advantages[place]), 4) if advantages is not None and trained[place] else None
        yield TokenView(text, version, logprob, of_learner[place], int(trained[place]), advantage)


def _aligned(sampled: npt.NDArray[np.float32], scores: Scores | None) -> npt.NDArray[np.float32] | None:
    """Return the learner's log-probs of a segment's tokens that train; None where they are not known.

    A step's rows may hold a rollout's segments in another order, so they are found by what sampled them.
    """
    if scores is None or not len(sampled):
        return None
    for begin in range(len(scores.sampled) - len(sampled) + 1):
        if np.array_equal(scores.sampled[begin : begin + len(sampled)], sampled):
            return scores.learner[begin : begin + len(sampled)]
    return None


def _ends(views: list[TokenView]) -> list[TokenView]:
    left_out = len(views) - MAX_TOKENS
    if left_out <= 0:
        return views
    return [*views[: MAX_TOKENS // 2], _left_out(left_out), *views[-(MAX_TOKENS // 2) :]]


def _left_out(count: int) -> TokenView:
    return TokenView(f" … {count} more tokens … ", None, None, None, 0)
