"""Decides whether log-probs that a server gives are those of version v. Pure.

To be near v is not enough: one step at a customary learning rate moves log-probs by less than any tolerance that allows
for rounding, so a swap that was left out would pass. Each of these is a fault:

1. Far from v: in float32 one log-prob in ten differs by more than the tolerance, or one by more than 4 times as much;
   in 16 bits half of them, one in ten by more than 4 times and one by more than 40 times as much; or one is not finite.
2. Not moved: every log-prob is, bit for bit, the one from before the swap, though the weights that were sent differ.
3. Nearer to what the server held before than to v, where the two can be told apart.
4. Unusual: `UNUSUAL` times as far from v as this server is from the learner otherwise.

In 16 bits the differences of a probe have a heavy tail, from sequence to sequence too. Two correct computations of a
model of 135 M in bfloat16 (transformers in pure bfloat16, and under autocast) differed over 96 probes by at most 0.13
nats in the median of a probe, 0.41 in its ninth decile, and 4.4 in its maximum. "Far" in 3 and 4 is the median.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# Quantiles of a probe's differences, and how many times the tolerance bounds each.
BOUNDS = (("ninth decile", 0.9, 1.0), ("maximum", 1.0, 4.0))
BOUNDS_OF_16_BITS = (("median", 0.5, 1.0), ("ninth decile", 0.9, 4.0), ("maximum", 1.0, 40.0))

# v and the weights before it can be told apart where they differ by this many times the server's usual difference.
APART = 4.0
UNUSUAL = 10.0

# The usual difference is the largest of the last REMEMBERED proven ones; with fewer than LEARNT it is not known.
REMEMBERED = 16
LEARNT = 3

# Sampled words of the weights (`Snapshot.words`) that must differ before a log-prob is expected to move.
MIN_CHANGED = 16

# By the type that a server computes in: nats, median over a probe, by which two correct implementations may differ even
# if they have differed by less so far.
ROUNDING = {"float32": 1e-6, "bfloat16": 2e-3, "float16": 3e-4}


class Baseline:
    """A server's usual difference from the learner, learnt from its proofs: nats, median over a probe.

    Until it is learnt, any difference within `tolerance` may be usual, as it is for a quantised server.
    """

    def __init__(self, dtype: str, tolerance: float) -> None:
        self.bounds = BOUNDS if dtype == "float32" else BOUNDS_OF_16_BITS
        self._least = ROUNDING[dtype]
        self._tolerance = tolerance
        self._seen: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def is_learnt(self) -> bool:
        return len(self._seen) >= LEARNT

    @property
    def difference(self) -> float:
        return max(self._least, *self._seen) if self.is_learnt else self._tolerance / APART

    def learn(self, difference: float) -> None:
        self._seen.append(difference)


@dataclass(frozen=True)
class Evidence:
    """Log-probs of one probe, and how much the weights changed.

    Attributes:
        learner: Log-probs by version v, float32 [T-1].
        served: Log-probs by the server after the swap, float32 [T-1], or [engines, T-1] for `judge_engines`.
        before: Log-probs by the server before the swap, as `served`; None if it was not asked.
        changed: How many words sampled from the weights differ between v and what was proven on the server before;
            None if unknown, or if the server may round the difference away.
    """

    learner: Floats
    served: Floats
    before: Floats | None = None
    changed: int | None = None


@dataclass(frozen=True)
class Judgement:
    """The judgement of one probe. Differences in nats.

    Attributes:
        max_abs_diff: Largest difference between server and learner.
        difference: Median difference between server and learner.
        moved: Median difference between the learner and the server before the swap, None if unknown.
        told_apart: Whether rule 2 or 3 could find a swap that was left out.
        fault: The fault, None if there is none.
    """

    max_abs_diff: float
    difference: float
    moved: float | None
    told_apart: bool
    fault: str | None


def judge_engines(evidence: Evidence, tolerance: float, baseline: Baseline) -> Judgement:
    """Judge each data-parallel engine by itself, as `judge` does. The server is as good as its worst engine."""
    engines = len(evidence.served)
    before: list[Floats | None] = [None] * engines
    if evidence.before is not None and len(evidence.before) == engines:
        before = [*evidence.before]
    judged = [
        judge(replace(evidence, served=now, before=then), tolerance, baseline)
        for now, then in zip(evidence.served, before, strict=True)
    ]
    of = [f"(engine {place}) " if len(judged) > 1 else "" for place in range(len(judged))]
    moved = [each.moved for each in judged if each.moved is not None]
    return Judgement(
        max(each.max_abs_diff for each in judged),
        max(each.difference for each in judged),
        min(moved) if len(moved) == len(judged) else None,
        all(each.told_apart for each in judged),
        next((f"{of[place]}{each.fault}" for place, each in enumerate(judged) if each.fault is not None), None),
    )


def judge(evidence: Evidence, tolerance: float, baseline: Baseline) -> Judgement:
    """Judge whether `evidence` shows that the server computes with version v.

    Args:
        tolerance: What the differences of a proven version stay below, in nats: rule 1.
        baseline: The server's usual difference from the learner.
    """
    learner, served, before = evidence.learner, evidence.served, evidence.before
    if served.shape != learner.shape or not np.isfinite(served).all():
        wrong = "its log-probs of the probe differ by inf from the learner's: some are missing or not finite"
        return Judgement(float("inf"), float("inf"), None, False, wrong)
    off = np.abs(served - learner)
    largest, difference = float(off.max()), float(np.median(off))
    off_bounds = [
        (name, measured, bound)
        for name, share, times in baseline.bounds
        if (measured := float(np.quantile(off, share))) > (bound := times * tolerance)
    ]
    moved: float | None = None
    must_move = apart = same = False
    still = 0.0  # Distance of the server's log-probs from those before the swap.
    if before is not None and before.shape == learner.shape and np.isfinite(before).all():
        moved = float(np.median(np.abs(learner - before)))
        apart = moved > APART * baseline.difference
        must_move = evidence.changed is not None and evidence.changed >= MIN_CHANGED
        still = float(np.median(np.abs(served - before)))
        same = np.array_equal(served, before)
    fault = None
    if off_bounds:
        name, measured, bound = off_bounds[0]
        fault = (
            f"its log-probs of the probe differ by {measured:.2g} ({name}) from the learner's, more than the {bound:g} "
            f"that is allowed"
        )
    elif must_move and same:
        fault = "its log-probs are exactly those from before the swap, though other weights were sent"
    elif apart and difference >= still:
        fault = (
            f"its log-probs are nearer to what it held before than to the learner's, from which they differ by "
            f"{difference:.2g} (median of the probe)"
        )
    elif baseline.is_learnt and difference > UNUSUAL * baseline.difference:
        fault = (
            f"its log-probs differ by {difference:.2g} (median of the probe) from the learner's, more than "
            f"{UNUSUAL:g} times the {baseline.difference:.2g} that is usual for it"
        )
    return Judgement(largest, difference, moved, apart or must_move, fault)
