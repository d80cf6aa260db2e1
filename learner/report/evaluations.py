"""What people read of an evaluation: its line in `evaluations.jsonl`, on the terminal and in the summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import msgspec

from learner.report.journal import Record
from protocol.evaluations import Evaluation

FILE_NAME = "evaluations.jsonl"


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
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(evaluation.failures.items()))
        text += f"; failed: {why}"
    return text
