"""What every reward gets and gives, whether a function of the user's or a classifier on a server computes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_worker.user_code import UserCodeError

# What a reward function gets by these names is ours, so no column of the data set may have one.
GIVEN = ("completions", "prompts", "completion_ids", "trainer_state", "log_metric", "log_extra")

# What a task with environments gives besides, and one with an agent; the component that is an agent's own reward.
ENVIRONMENTS = "environments"
RESULTS = "agent_results"
OWN_REWARD = "agent"


class RewardError(UserCodeError):
    """A reward failed, or did not give a list of numbers; the text names it, and so does `function`. `retryable` false:
    another try would fail alike."""

    def __init__(self, function: str, text: str, kind: str, where: str | None, retryable: bool = False) -> None:
        super().__init__(text, kind, where)
        self.function = function
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a reward function gets as `trainer_state`, under the names of transformers' `TrainerState`.

    global_step: the learner's optimiser steps when the group's ticket was issued; version: the policy's then; epoch:
    passes over the data set before this one; max_steps: steps of the run, None where it is measured in epochs.
    """

    global_step: int = 0
    version: int = 0
    epoch: float = 0.0
    max_steps: int | None = None


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """What rewards are computed from; `completions` and `completion_ids` have one entry per rollout.

    A completion is a list of messages where the prompt is one, else text; its ids are all that followed the
    prompt, tool messages included. `columns` are those of the group's row. prompts: one per rollout, where environments
    gave each its own; environments: the objects themselves, one per rollout; own: the rewards that the rollouts brought
    with them, by component; results: what their agents returned, None where the task has none.
    """

    prompt: Any
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: Mapping[str, Any]
    state: TrainerState = TrainerState()
    prompts: list[Any] | None = None
    environments: list[Any] | None = None
    own: Sequence[Mapping[str, float | None]] = ()
    results: Sequence[Any] | None = None

    def arguments(self) -> dict[str, Any]:
        """What every function gets; what it may ask for besides is not among them."""
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
    """What one reward gave for a batch: a number or None per rollout, and what it noted.

    metrics: figures of the whole batch, by name; extra: one text per rollout, by column; left_out: why notes were not
    kept.
    """

    rewards: list[float | None]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Score:
    """A rollout's reward: the weighted sum of the components that are not None; None if all are. `metrics` and `extra`:
    what the rewards noted, as a `Rollout` has them."""

    components: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)


class Reward(Protocol):
    """One reward of a task. `name`: its component's."""

    @property
    def name(self) -> str: ...

    def check(self, row: Mapping[str, Any], besides: Collection[str] = ()) -> None:
        """Raises `ConfigError` if it cannot be computed from the columns of `row`, and what is given besides:
        ENVIRONMENTS, RESULTS."""

    async def values(self, batch: RewardBatch, timeout_s: float) -> Values:
        """Raises `RewardError`, also if it takes longer than `timeout_s`."""
