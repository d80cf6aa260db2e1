"""An evaluation: what the learner asks the queue for, and what came of it.

Evaluations run beside the training, on the same workers and servers; their groups are not trained on.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from protocol.messages import Natural, Seconds

# What ended an evaluation: all of its rows came to an end; its time-out; the end of the run.
Ended = Literal["complete", "deadline", "run_over"]


class EvaluationRequest(msgspec.Struct):
    """Ask for an evaluation that belongs to `step`; asking again for the same changes nothing.

    version: no server samples for it before it serves this one or a newer; rows: the first so many of the data set,
    None for all; temperature: None for the run's; timeout_s: seconds from now until it is ended as it is.
    """

    session: int
    step: Natural
    version: Natural
    rows: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None
    group_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None
    timeout_s: Seconds


class Evaluation(msgspec.Struct):
    """An evaluation of `step`, so far or at its end; figures are over the rows that are done, None while none is.

    rows: None until a worker has said how many there are; done, failed: of them; failures: those that failed, by
    reason; ended: None while it is open; waits_for: what keeps it from going on, None if nothing does; seconds: since
    it was asked for, at its end how long it took. rollouts: episodes that have a reward.

    reward: mean over the rows of each row's mean; reward_std: standard deviation of the rows' means, of the sample;
    rewards: of each reward function, as `reward` is; best: mean over the rows of each row's best rollout, None where
    group_size is 1; passes: whether every reward so far is 0 or 1, so that `best` is a share of rows; mean_length:
    sampled tokens of a rollout; clipped: share of rollouts that ended as `length` or `context`; finished: rollouts by
    what ended them; versions: lowest and highest policy version that sampled any of it.
    """

    step: int
    version: int
    group_size: int
    temperature: float | None = None
    rows: int | None = None
    done: int = 0
    failed: int = 0
    failures: dict[str, int] = {}
    ended: Ended | None = None
    waits_for: str | None = None
    seconds: float = 0.0
    rollouts: int = 0
    reward: float | None = None
    reward_std: float | None = None
    rewards: dict[str, float] = {}
    best: float | None = None
    passes: bool = False
    mean_length: float | None = None
    clipped: float | None = None
    finished: dict[str, int] = {}
    versions: tuple[int, int] | None = None

    @property
    def best_name(self) -> str:
        """What the field calls `best`: pass@k where a rollout passes or fails, else best@k."""
        return f"{'pass' if self.passes else 'best'}@{self.group_size}"


def figures(evaluation: Evaluation) -> dict[str, float]:
    """Those that are known, for `metrics.jsonl` and trackers, under TRL's names where the meaning is the same."""
    found: dict[str, float | None] = {
        "eval/step": evaluation.step,
        "eval/reward": evaluation.reward,
        "eval/reward_std": evaluation.reward_std,
        **{f"eval/rewards/{name}/mean": value for name, value in evaluation.rewards.items()},
        f"eval/{evaluation.best_name}": evaluation.best,
        "eval/completions/mean_length": evaluation.mean_length,
        "eval/completions/clipped_ratio": evaluation.clipped,
        "eval/runtime": evaluation.seconds,
        "eval/rows": evaluation.rows,
        "eval/failed": evaluation.failed,
        "eval/version_min": None if evaluation.versions is None else evaluation.versions[0],
        "eval/version_max": None if evaluation.versions is None else evaluation.versions[1],
    }
    return {name: value for name, value in found.items() if value is not None}
