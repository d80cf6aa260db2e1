"""What people read of an evaluation: its line in `evaluations.jsonl`, on the terminal and in the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from learner.report.journal import Record
from protocol.status import Evaluation

FILE_NAME = "evaluations.jsonl"
# In a line of `metrics.jsonl`: the figures of those that ended by the same step and are not the newest, one mapping for
# each, in the order of their steps.
EARLIER = "eval/earlier"
_STEP = "eval/step"


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """An evaluation that has ended; its line holds the evaluation's own fields, and what it calls the best of a row."""

    evaluation: Evaluation

    def flat(self) -> dict[str, Any]:
        line: dict[str, Any] = msgspec.to_builtins(self.evaluation)
        if self.evaluation.best is not None:
            line[self.evaluation.best_name] = self.evaluation.best
        return line

    @classmethod
    def of(cls, line: dict[str, Any]) -> Self:
        evaluation = msgspec.convert(line, Evaluation)
        return cls(evaluation.step, evaluation)


def beside(line: Mapping[str, Any], ended: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """A line of `metrics.jsonl` with the figures of evaluations that have `ended` besides those that it has: the newest
    step's under their names, all others under `EARLIER`."""
    other = {name: value for name, value in line.items() if not name.startswith("eval/")}
    has = {name: value for name, value in line.items() if name not in other}
    known = [*has.pop(EARLIER, ()), *([has] if has else ()), *ended]
    *earlier, newest = sorted(known, key=lambda figures: figures[_STEP]) or [{}]
    return {**other, **newest, **({EARLIER: earlier} if earlier else {})}


def told(evaluation: Evaluation) -> str:
    """An evaluation in one line."""
    rows = evaluation.rows
    if rows is None:
        return f"evaluation of step {evaluation.step}: it ended ({evaluation.ended}) before any row was handed out"
    parts = [f"{evaluation.done} of {rows} rows" if evaluation.failed else f"{rows} rows"]
    if evaluation.group_size > 1:
        parts[0] += f" x {evaluation.group_size}"
    if evaluation.best is not None:
        parts.append(f"{evaluation.best_name} {evaluation.best:.3f}")
    if evaluation.mean_length is not None:
        parts.append(f"{evaluation.mean_length:.0f} tokens")
    if evaluation.clipped:
        parts.append(f"{evaluation.clipped:.0%} cut off")
    if evaluation.versions is not None:
        oldest, newest = evaluation.versions
        parts.append(f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
    parts.append(f"{evaluation.seconds:.1f} s")
    reward = "no reward" if evaluation.reward is None else f"reward {evaluation.reward:.3f}"
    text = f"evaluation of step {evaluation.step}: {reward} ({', '.join(parts)})"
    if evaluation.failed:
        counts = sorted(evaluation.failures.items())
        why = ", ".join(f"{reason.removeprefix('failed:')} {count}" for reason, count in counts)
        text += f"; failed: {why}"
    return text
