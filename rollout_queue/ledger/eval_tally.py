"""What an evaluation has come to: figures over the rows that are done, added up row by row."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from copy import deepcopy

import msgspec

from protocol import reasons
from protocol.messages import Group
from protocol.status import Ended, Evaluation
from rollout_queue.ledger.group_facts import GroupFacts
from rollout_queue.ledger.records import EvalRecord, EvalRow, EvalRowState, RowResult

# The policy was cut off, and did not end by itself.
_CUT_OFF = ("length", "context")


def result_of(group: Group, facts: GroupFacts) -> RowResult:
    """What is kept of a valid group of an evaluation."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in group.rollouts:
        for name, value in rollout.reward_components.items():
            if value is not None:
                by_name[name].append(value)
    return RowResult(
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        components={name: math.fsum(values) / len(values) for name, values in by_name.items()},
        lengths=tuple(rollout.sampled_tokens for rollout in group.rollouts),
        finished=dict(Counter(str(rollout.finish_reason) for rollout in group.rollouts)),
        servers=facts.servers,
    )


class _Mean(msgspec.Struct):
    """Mean and sample deviation of values that come one by one (the latter by Welford 1962)."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        before = self.total / self.count if self.count else value
        self.count += 1
        self.total += value
        self.squares += (value - before) * (value - self.total / self.count)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def std(self) -> float | None:
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None


class EvalTally:
    """Takes in rows at their end, each once; `evaluation` costs the same however many they are."""

    def __init__(self, rows: Iterable[EvalRow] = ()) -> None:
        self.failures: Counter[str] = Counter()
        self._rewards, self._best = _Mean(), _Mean()
        self._components: defaultdict[str, _Mean] = defaultdict(_Mean)
        self._passes = True
        self._rollouts = self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._versions: tuple[int, int] | None = None
        for row in rows:
            self.add(row)

    @property
    def ended(self) -> int:
        """Rows that are done or failed."""
        return self._rewards.count + self.failures.total()

    def add(self, row: EvalRow) -> None:
        """Count a row, if it is at its end."""
        if row.state is EvalRowState.FAILED:
            self.failures[row.reason or reasons.OTHER] += 1
        if row.state is not EvalRowState.DONE or (result := row.result) is None:
            return
        self._rewards.add(math.fsum(result.rewards) / len(result.rewards))
        self._best.add(max(result.rewards))
        self._passes = self._passes and all(reward in (0.0, 1.0) for reward in result.rewards)
        for name, value in result.components.items():
            self._components[name].add(value)
        self._rollouts += len(result.rewards)
        self._tokens += sum(result.lengths)
        self._finished.update(result.finished)
        versions = [version for by in result.servers for version in (by.oldest, by.newest)]
        seen = [*versions, *(self._versions or ())]
        self._versions = (min(seen), max(seen)) if seen else None

    def and_also(self, rows: Iterable[EvalRow]) -> EvalTally:
        """This tally with further rows, while it stays as it is."""
        more = deepcopy(self)
        for row in rows:
            more.add(row)
        return more

    def evaluation(
        self, record: EvalRecord, seconds: float, ended: Ended | None = None, waits_for: str | None = None
    ) -> Evaluation:
        """The evaluation as people see it; of one that has ended, rows that came to no end count as failed."""
        failures, rows = dict(self.failures), record.rows
        if ended is not None and rows is not None and (left := rows - self.ended) > 0:
            reason = reasons.RUN_FINISHED if ended == "run_over" else reasons.DEADLINE
            failures[reason] = failures.get(reason, 0) + left
        cut_off = sum(self._finished[reason] for reason in _CUT_OFF)
        return Evaluation(
            step=record.step,
            version=record.version,
            group_size=record.group_size,
            temperature=record.temperature,
            rows=rows,
            done=self._rewards.count,
            failed=sum(failures.values()),
            failures=failures,
            ended=ended,
            waits_for=waits_for,
            seconds=seconds,
            rollouts=self._rollouts,
            reward=self._rewards.value,
            reward_std=self._rewards.std,
            rewards={name: of.total / of.count for name, of in self._components.items()},
            best=self._best.value if record.group_size > 1 else None,
            passes=self._passes and self._rewards.count > 0,
            mean_length=self._tokens / self._rollouts if self._rollouts else None,
            clipped=cut_off / self._rollouts if self._rollouts else None,
            finished=dict(self._finished),
            versions=self._versions,
        )
