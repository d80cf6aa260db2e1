"""Decides from the figures of a few steps whether an update destroyed the policy. Pure.

A step's figures are taken before its own update, so they show what the updates before it did. One of these is a
collapse, where the step before showed none:

1. Lost what it sampled: over the tokens of some staleness s >= 1, sampled a few updates ago, the policy is `LOST_NATS`
   away from the sampler (`sampler/kl_staleness_<s>`), and `kl` over all tokens is at least `LOST_KL`. Tokens of
   staleness 0, where there are any, must agree: else a server computes with other weights, and no update did it.
2. Random: since some step the entropy is `MOVED_TIMES` as high as it was, in the newest two steps `RANDOM_TIMES` as
   high and `RANDOM_NATS` higher, and the reward has not risen.
3. Frozen: since some step the entropy is lower by `MOVED_TIMES`, in the newest two steps below `FROZEN_PART` of what it
   was, and the reward has lost more than half.

The last two see a policy that samples for itself, at a staleness of 0. What was: the median over the steps before that
step. A policy that learns becomes surer while its reward rises, which is none of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec

# Steps that are looked at, the newest among them.
WINDOW_STEPS = 12

LOST_NATS, LOST_KL = 2.0, 0.5

# KL at staleness 0 from which on learner and server do not compute the same policy, nats a token.
MISMATCH_NATS = 0.2

RANDOM_TIMES, RANDOM_NATS = 3.0, 2.0

FROZEN_PART, MIN_ENTROPY = 0.1, 0.05

MOVED_TIMES = 1.5

# What the queue's diagnosis calls a cause that is an update which destroyed the policy.
CAUSE = "learning rate"

_STALE_KL = "sampler/kl_staleness_"

# What a run that such an update ended, or would, must not be resumed without.
REMEDY = "and a lower learner.learning_rate"

Row = Mapping[str, float | None]


class Collapse(msgspec.Struct, frozen=True):
    """A policy that was destroyed.

    Attributes:
        step: The step whose update did it.
        good_step: The newest step after which the policy was still fine; 0 for the initial model.
        seen_at: The step whose figures show it.
        learning_rate, grad_norm: Of the update that did it, None if unknown.
        why: The figures, with those of the step before.
    """

    step: int
    good_step: int
    seen_at: int
    learning_rate: float | None
    grad_norm: float | None
    why: str

    def describe(self, learning_rate: float, lower: float) -> str:
        """Describe it, with the remedy: the setting's value, and a lower one."""
        norm = "" if self.grad_norm is None else f", at a gradient norm of {self.grad_norm:.2g}"
        rate = "" if self.learning_rate is None else f", with a learning rate of {self.learning_rate:g}{norm}"
        return (
            f"the update of step {self.step} destroyed the policy{rate}: {self.why}. Lower learner.learning_rate = "
            f"{learning_rate:g}, to {lower:g} first"
        )


def find_collapse(rows: Sequence[Row]) -> Collapse | None:
    """Judge the newest of some steps.

    Args:
        rows: Steps in a row, the newest last, at most `WINDOW_STEPS` of which count: figures by their names in
            `metrics.jsonl`, `step` and `reward` among them.
    """
    rows = rows[-WINDOW_STEPS:]
    if not rows:
        return None
    if (lost := _lost(rows[-1])) is not None:
        before = rows[-2] if len(rows) > 1 else None
        was = "" if before is None else f" ({_figures(before, 'kl', 'ess')} at step {_step(before)})"
        return _collapse(rows, first_bad=len(rows) - 1, why=f"{lost}{was}")
    for place in range(1, len(rows) - 1):
        if (changed := _random_or_frozen(rows[:place], rows[place:])) is not None:
            return _collapse(rows, first_bad=place, why=changed)
    return None


def _collapse(rows: Sequence[Row], first_bad: int, why: str) -> Collapse:
    """Name the update before the first bad step."""
    seen_at = _step(rows[first_bad])
    update = rows[first_bad - 1] if first_bad else {}
    return Collapse(
        step=max(0, seen_at - 1),
        good_step=max(0, seen_at - 2),
        seen_at=_step(rows[-1]),
        learning_rate=update.get("learning_rate"),
        grad_norm=update.get("grad_norm"),
        why=why,
    )


def _lost(row: Row) -> str | None:
    stale = dict(_by_staleness(row))
    fresh, kl = stale.pop(0, 0.0), row.get("kl")
    if not stale or kl is None or kl < LOST_KL or abs(fresh) > MISMATCH_NATS:
        return None
    age, nats = max(stale.items(), key=lambda item: item[1])
    if nats < LOST_NATS:
        return None
    return (
        f"at step {_step(row)} tokens that were sampled {age} version{'s' if age > 1 else ''} ago are {nats:.2g} nats "
        f"less likely to it on average, {_figures(row, 'kl', 'ess')}"
    )


def _random_or_frozen(before: Sequence[Row], after: Sequence[Row]) -> str | None:
    entropies, rewards = [*_known(before, "entropy")], [*_known(before, "reward")]
    now, reward = [*_known(after, "entropy")], [*_known(after, "reward")]
    if not entropies or not rewards or len(now) < len(after) or len(reward) < len(after):
        return None
    was, earned = median(entropies), median(rewards)
    is_random = min(now) >= MOVED_TIMES * was and min(now[-2:]) >= max(RANDOM_TIMES * was, was + RANDOM_NATS)
    is_frozen = was >= MIN_ENTROPY and max(now) <= was / MOVED_TIMES and max(now[-2:]) <= FROZEN_PART * was
    lost_half = max(reward) <= min(rewards) and earned - max(reward) > abs(earned) / 2
    if not (is_random and max(reward) <= earned) and not (is_frozen and lost_half):
        return None
    return (
        f"its entropy went from {was:.2g} to {now[-1]:.2g} nats a token and its reward from {earned:.3g} to "
        f"{reward[-1]:.3g}, from step {_step(after[0])} to step {_step(after[-1])}"
    )


def _by_staleness(row: Row) -> Iterator[tuple[int, float]]:
    for name, value in row.items():
        if name.startswith(_STALE_KL) and value is not None:
            yield int(name.removeprefix(_STALE_KL)), value


def _figures(row: Row, *names: str) -> str:
    shown = [f"{name} {value:.2g}" for name in names if (value := row.get(name)) is not None]
    return ", ".join(shown) or "no figures"


def _step(row: Row) -> int:
    return int(row.get("step") or 0)


def _known(rows: Sequence[Row], name: str) -> Iterator[float]:
    return (value for row in rows if (value := row.get(name)) is not None)
