"""Chooses the conversations that each step learns from, and packs them into rows of their own. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from slipstream.learner.feed.packing import PackedRow, Sample, pack
from slipstream.protocol.config import RunConfig
from slipstream.protocol.demonstrations import Demonstration, TaughtSegment


class Demonstrations:
    """Conversations in an order that follows from the seed: each comes once in an epoch, and a resumed run takes those
    that it would have taken.

    Args:
        conversations: At least one.
        batch_size: Conversations of a step.
        epochs: Passes after which there are no more; None to go on for ever.
    """

    def __init__(
        self, conversations: Sequence[Demonstration], batch_size: int, seed: int, epochs: float | None = None
    ) -> None:
        self._conversations = conversations
        self._batch_size = batch_size
        self._seed = seed
        self._end = math.inf if epochs is None else math.ceil(Fraction(repr(epochs)) * len(conversations))

    @property
    def steps(self) -> int:
        """Steps in all. Without epochs they have no end, and this raises `OverflowError`."""
        return math.ceil(self._end / self._batch_size)

    def epoch_after(self, step: int) -> float:
        """Return the passes that are done after `step`."""
        return min(step * self._batch_size, self._end) / len(self._conversations)

    def of_step(self, step: int) -> list[Demonstration]:
        """Return the conversations of `step`, counted from 1; the last step may have fewer."""
        first, count = (step - 1) * self._batch_size, len(self._conversations)
        places = range(first, int(min(first + self._batch_size, self._end)))
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in places}}
        return [self._conversations[orders[place // count][place % count]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._conversations)).tolist()
        return order


def held_out(
    conversations: Sequence[Demonstration], share: float, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Split conversations into those to learn from, at least one, and those to measure the loss on."""
    count = min(round(share * len(conversations)), len(conversations) - 1)
    chosen = {*np.random.default_rng([seed, len(conversations)]).permutation(len(conversations))[:count].tolist()}
    kept = [of for place, of in enumerate(conversations) if place not in chosen]
    return kept, [conversations[place] for place in sorted(chosen)]


def rows_of(
    conversations: Sequence[Demonstration], coefficient: float, token_budget: int, branches: bool = True, ranks: int = 1
) -> list[PackedRow]:
    """Pack conversations into rows whose losses add up to `coefficient` times the mean of -log p over their tokens that
    are taught.

    Args:
        token_budget, branches, ranks: As for `packing.pack`.
    """
    samples = [
        _sample(segment, number, number % ranks)
        for number, conversation in enumerate(conversations)
        for segment in conversation.segments
    ]
    tokens = sum(taught_tokens(conversations))
    rows = pack(samples, token_budget, branches, ranks)
    return [replace(row, supervised=coefficient / tokens) for row in rows]


def taught_tokens(conversations: Sequence[Demonstration]) -> Iterator[int]:
    """Yield the number of tokens that are taught of each segment."""
    for conversation in conversations:
        yield from (int(np.count_nonzero(_weights(segment))) for segment in conversation.segments)


def _weights(segment: TaughtSegment) -> npt.NDArray[np.float32]:
    weights = segment.loss_mask.astype(np.float32)
    weights[0] = 0.0  # no token before it predicts it
    return weights


def _sample(segment: TaughtSegment, number: int, group: int) -> Sample:
    """Make a sample without a sampler. All that stand in one row share the path that they have in common, such as the
    description of the tools."""
    nothing = np.zeros(len(segment.token_ids), dtype=np.float32)
    return Sample(
        token_ids=segment.token_ids,
        behaviour=nothing,
        weights=_weights(segment),
        staleness=nothing.astype(np.int32),
        fresh=nothing.astype(np.bool_),
        rollout=number,
        group=group,
    )


def mixed_in(
    config: RunConfig, conversations: Sequence[Demonstration], branches: bool
) -> Callable[[int], list[PackedRow]]:
    """Return a function that makes the rows of demonstrations of an optimiser step by its number: none with
    `learner.demonstrations_coef = 0`.

    Args:
        branches: As for `packing.pack`.
    """
    learner = config.learner
    if not learner.demonstrations_coef:
        return lambda step: []
    demonstrations = Demonstrations(conversations, config.demonstrations.batch_size, config.run.seed)

    def rows(step: int) -> list[PackedRow]:
        chosen = demonstrations.of_step(step)
        return rows_of(chosen, learner.demonstrations_coef, learner.token_budget, branches, learner.ranks)

    return rows
