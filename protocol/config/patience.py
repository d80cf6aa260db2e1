"""How long a group may take, and what must be more patient than that: a ticket's greatest age, and the learner.

Whether a run has environments its task says, which the run file only names: `check` is run without them where a run
file is read, and with them where its task is.
"""

from __future__ import annotations

from typing import TypeAlias

from protocol.config.sections import LearnerSection, QueueSection, WorkerSection

# What is waited for, as a reader of the run file knows it, with its seconds.
_Part: TypeAlias = tuple[str, float]


def ticket_max_age_s(queue: QueueSection, worker: WorkerSection) -> float:
    """`queue.ticket_max_age_s` with its "auto" worked out: twice environment, episode and rewards, so that whatever a
    group may take is in it, as an environment is made and reset, and both it and reward functions may reward."""
    if queue.ticket_max_age_s != "auto":
        return queue.ticket_max_age_s
    return 2 * (worker.environment_timeout_s + worker.episode_timeout_s + worker.reward_timeout_s)


def check(queue: QueueSection, worker: WorkerSection, learner: LearnerSection, environments: bool = False) -> None:
    """environments: whether the run's episodes are played in some. Raises `ValueError`."""
    episode = [("worker.episode_timeout_s", worker.episode_timeout_s)]
    group = [*episode, ("worker.reward_timeout_s", worker.reward_timeout_s)]
    if environments:
        made_and_reset = ("2 x worker.environment_timeout_s", 2 * worker.environment_timeout_s)
        episode = [made_and_reset, *group]  # get_reward is the episode's own
        group = [made_and_reset, *episode[1:2], ("2 x worker.reward_timeout_s", 2 * worker.reward_timeout_s)]
    age_s = ticket_max_age_s(queue, worker)
    if age_s < _sum(episode):
        raise ValueError(
            f"queue.ticket_max_age_s = {age_s:g} is less than {_listed(episode)}: the longest episodes would lose "
            f"their ticket before they end; raise queue.ticket_max_age_s to {_sum(episode):g} or more, or lower "
            f"{_settings(episode)}"
        )
    if learner.stall_timeout_s <= _sum(group):
        raise ValueError(
            f"learner.stall_timeout_s = {learner.stall_timeout_s:g} is not more than {_listed(group)}: the learner "
            f"would give up while a group may still come; raise learner.stall_timeout_s above {_sum(group):g}, or "
            f"lower {_settings(group)}"
        )


def _sum(parts: list[_Part]) -> float:
    return sum(seconds for _, seconds in parts)


def _listed(parts: list[_Part]) -> str:
    texts = [f"{name} = {seconds:g}" for name, seconds in parts]
    return f"{', '.join(texts[:-1])} and {texts[-1]} together" if len(texts) > 1 else texts[0]


def _settings(parts: list[_Part]) -> str:
    return " or ".join(name.removeprefix("2 x ") for name, _ in parts)
