"""Inputs and results of every reward, whether a function of the user's or a classifier on a server computes it, and the
notes that a function may make with `log_metric(name, value)` and `log_extra(column, values)`.

Both may be called from any thread, and late: by a function that timed out, or by a thread that it started. Only notes
made before `close` count. Notes are bounded; those beyond a bound are left out with a reason.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from slipstream.protocol.messages import MAX_METRIC
from slipstream.protocol.rollouts import is_counted
from slipstream.rollout_worker.user_code import UserCodeError
from slipstream.rollout_worker.user_code.values import encodable

RESULTS = "agent_results"

# The answer that rewards are tried with before a run.
TRIED_ANSWER = "6"

OWN_REWARD = "agent"

# Maximum for one reward function and one group. The queue takes 256 metrics a rollout, those of tools included.
MAX_METRICS = 32

MAX_COLUMNS = 16

MAX_REASONS = 4

NAME_CHARACTERS = 128

TEXT_CHARACTERS = 2000

_SHOWN_CHARACTERS = 60


class RewardError(UserCodeError):
    """A reward failed or did not give a list of numbers.

    Attributes:
        function: Name of the reward.
        retryable: Whether another attempt may succeed.
    """

    def __init__(self, function: str, text: str, kind: str, where: str | None, retryable: bool = False) -> None:
        super().__init__(text, kind, where)
        self.function = function
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The `trainer_state` of a reward function, with the names of transformers' `TrainerState`.

    Attributes:
        global_step: The learner's optimiser steps when the group's ticket was issued.
        version: The policy version then.
        epoch: Passes over the data set before this one.
        max_steps: Steps of the run; None where it is measured in epochs.
    """

    global_step: int = 0
    version: int = 0
    epoch: float = 0.0
    max_steps: int | None = None


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """One group, as rewards are computed from it.

    Attributes:
        prompt: The row's prompt.
        completions: One per rollout: a list of messages where the prompt is one, otherwise text.
        completion_ids: One per rollout: all token ids after the prompt, tool messages included.
        columns: The row's columns.
        prompts: One per rollout, where environments gave each its own.
        own: For each rollout the rewards that it brings with it, by component.
        inputs: What else rollouts bring for functions that ask for it: one value per rollout, by name of the parameter.
    """

    prompt: Any
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: Mapping[str, Any]
    state: TrainerState = TrainerState()
    prompts: list[Any] | None = None
    own: Sequence[Mapping[str, float | None]] = ()
    inputs: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def made_up(cls, row: Mapping[str, Any], size: int) -> Self:
        """Return a group of `size` equal answers to `row`, in the form that the run will have."""
        is_text = isinstance(row["prompt"], str)
        answer: Any = TRIED_ANSWER if is_text else [{"role": "assistant", "content": TRIED_ANSWER}]
        return cls(row["prompt"], [copy.deepcopy(answer) for _ in range(size)], [[0]] * size, row)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that every function gets, without those that it may ask for besides."""
        size = len(self.completions)
        columns = {name: [value] * size for name, value in self.columns.items() if name != "prompt"}
        return {
            "prompts": [self.prompt] * size if self.prompts is None else self.prompts,
            "completions": self.completions,
            "completion_ids": self.completion_ids,
            **columns,
        }


@dataclass(slots=True)
class Values:
    """Results of one reward for a batch.

    Attributes:
        rewards: A number or None per rollout.
        metrics: Numbers of the whole batch, by name.
        extra: One text per rollout, by column.
        left_out: Why notes were not kept.
    """

    rewards: list[float | None]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Score:
    """The score of a rollout.

    Attributes:
        components: Value of each reward.
        reward: Weighted sum of the components that are not None; None if all are.
        metrics: Numbers that the rewards noted.
        extra: Texts that the rewards noted.
    """

    components: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)


class Reward(Protocol):
    """One reward of a task. `name`: name of its component."""

    @property
    def name(self) -> str: ...

    def check_row(self, row: Mapping[str, Any], besides: Collection[str] = ()) -> None:
        """Raise `ConfigError` if it cannot be computed from the columns of `row` and the inputs `besides`."""

    async def check_score(self, row: Mapping[str, Any], timeout_s: float) -> str | None:
        """Score made-up answers to `row` before the run.

        Returns:
            Why these answers got no score, where a policy's may; None if they got one, or took too long.

        Raises:
            ConfigError: No answer can get a score.
        """

    async def values(self, batch: RewardBatch, timeout_s: float) -> Values:
        """Compute the reward of each rollout. Raises `RewardError`, also after `timeout_s` seconds."""


class Notes:
    """The notes of one call over a batch of `size` rollouts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._open = True
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[str]] = {}
        self._left_out: dict[str, None] = {}

    def close(self) -> Values:
        """Return the notes so far, without rewards. A metric that was noted several times is averaged, as in TRL."""
        with self._lock:
            self._open = False
            values = Values([], left_out=list(self._left_out))
        for name, noted in self._metrics.items():
            values.metrics[name] = math.fsum(number / len(noted) for number in noted)
        for column, texts in self._columns.items():
            if len(texts) == self._size:
                values.extra[column] = texts
            else:
                values.left_out.append(
                    f"log_extra({column!r}, ...) had {len(texts)} values for {self._size} completions; give one each"
                )
        return values

    def log_metric(self, name: str, value: Any) -> None:
        """Note a number of this batch; it is averaged over the step."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        name, shown = _name(name), _text(repr(value)[:_SHOWN_CHARACTERS])
        with self._lock:
            if not self._open:
                return
            if is_counted(name):
                self._leave_out(f"log_metric({name!r}, ...): that name is Slipstream's own; choose another")
            elif not abs(number) <= MAX_METRIC:
                self._leave_out(f"log_metric({name!r}, {shown}): give a finite number below {MAX_METRIC:g}")
            elif name not in self._metrics and len(self._metrics) == MAX_METRICS:
                self._leave_out(f"log_metric({name!r}, ...): {MAX_METRICS} metrics are the most")
            else:
                self._metrics.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Note a text about each completion, for people to read."""
        column, texts = _name(column), [_text(value) for value in values]
        with self._lock:
            if not self._open:
                return
            if column not in self._columns and len(self._columns) == MAX_COLUMNS:
                self._leave_out(f"log_extra({column!r}, ...): {MAX_COLUMNS} columns are the most")
                return
            found = self._columns.setdefault(column, [])
            # Reading one value beyond the maximum shows that there are too many.
            found += texts[: self._size + 1 - len(found)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Notes:
        return self  # A function that copies its arguments still writes here.

    def _leave_out(self, reason: str) -> None:
        if len(self._left_out) < MAX_REASONS:
            self._left_out[reason] = None


def _name(name: object) -> str:
    return encodable(str(name)[:NAME_CHARACTERS])


def _text(value: object) -> str:
    """Convert a note to text. Call it where the function runs, as `str` of an object is the user's code too."""
    text = value if isinstance(value, str) else str(value)
    return encodable(text if len(text) <= TEXT_CHARACTERS else f"{text[: TEXT_CHARACTERS - 3]}...")
