"""At which step a run changed, and what of it explains a fall of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.protocol.history import Event
from slipstream.protocol.status import LearnerStatus
from slipstream.rollout_queue.observe.causes import diagnose
from slipstream.rollout_queue.observe.changes import ChangeFinder
from slipstream.rollout_queue.observe.history import History
from slipstream.rollout_queue.observe.symptoms import Symptoms
from slipstream.rollout_queue.observe.windows import GroupOutcome
from tests.kit import config
from tests.kit.status import status

HIGH, LOW = [0.80, 0.84, 0.78, 0.82, 0.81, 0.79], [0.10, 0.14, 0.08, 0.12]


def found(name: str, values: Sequence[float], finder: ChangeFinder | None = None) -> list[str]:
    """Let a figure go through a run, a step each, and return what jumped, in words."""
    finder = finder or ChangeFinder()
    jumps = []
    for number, value in enumerate(values, start=1):
        jumps += finder.step({"step": number, "at": 100.0 * number, "rewards/other/mean": 0.5, name: value})
    return [jump.text for jump in jumps]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("reward", [*HIGH, *LOW], ["the reward fell from 0.807 to 0.107, from step 7 on"]),
        ("reward", [*LOW, *HIGH, *LOW, *LOW], ["rose", "fell"]),
        ("reward", [0.1 * number for number in range(20)], []),
        ("reward", [0.2, 0.9, 0.4, 0.7, 0.3, 0.8, 0.1, 0.2, 0.15], []),
        ("reward", [1.0] * 8 + [0.9] * 8, []),
        ("reward", [*HIGH, 0.1, *HIGH], []),
        ("reward", [*HIGH[:3], *LOW], []),
        ("rewards/format/mean", [*HIGH, *LOW], ["the reward of format fell from 0.807 to 0.107, from step 7 on"]),
        (
            "tools/search/failure_frequency",
            [0.02] * 6 + [0.9] * 3,
            ["90% of the calls of tool search fail, before 2%, from step 7 on"],
        ),
        ("tools/search/failure_frequency", [0.02] * 6 + [0.09] * 3, []),
        (
            "tools/search/call_s",
            [0.2] * 6 + [2.0] * 3,
            ["a call of tool search takes 2 s, before 0.2 s, from step 7 on"],
        ),
        ("tools/search/call_s", [0.001] * 6 + [0.009] * 3, []),
        ("entropy", [*HIGH, *LOW], []),
        ("kl", [0.01] * 6 + [0.9] * 3, ["kl went from 0.01 to 0.9, from step 7 on"]),
        ("kl", [0.0001] * 6 + [0.04] * 3, []),
        ("ess", [0.9] * 6 + [0.1] * 3, ["ess went from 0.9 to 0.1, from step 7 on"]),
        ("ess", [0.9] * 6 + [0.6] * 3, []),
        ("grad_norm", [0.4] * 6 + [3.0] * 3, ["grad_norm went from 0.4 to 3, from step 7 on"]),
    ],
)
def test_a_figure_that_jumps_is_named_with_its_step(name: str, values: list[float], expected: list[str]) -> None:
    texts = found(name, values)
    assert len(texts) == len(expected), texts
    assert all(part in text for part, text in zip(expected, texts, strict=True)), texts


def test_of_a_single_reward_function_the_reward_alone_is_named() -> None:
    finder = ChangeFinder()
    steps = [{"step": n, "at": n, "reward": v, "rewards/only/mean": v} for n, v in enumerate([*HIGH, *LOW], start=1)]
    assert [jump.name for step in steps for jump in finder.step(step)] == ["reward"]


def test_a_fall_that_only_the_policy_s_own_figures_explain_is_laid_to_the_rate() -> None:
    finder = ChangeFinder()
    for number, reward in enumerate([*HIGH, *LOW], start=1):
        kl = 0.01 if reward > 0.5 else 0.9
        finder.step({"step": number, "at": 100.0 * number, "reward": reward, "kl": kl})
    text = finder.describe_fall(config(learner={"learning_rate": 1e-4}), "slipstream rollouts run.toml")
    assert "kl went from 0.01 to 0.9, from step 7 on" in text
    assert text.endswith("lower learner.learning_rate = 0.0001")


def test_a_step_that_a_resumed_run_makes_again_is_looked_at_anew() -> None:
    finder = ChangeFinder()
    assert found("reward", [*HIGH, *LOW], finder) != []
    assert finder.fall is not None
    for number, value in enumerate(HIGH, start=5):
        assert finder.step({"step": number, "at": 5000.0, "reward": value}) == []
    assert finder.fall is None


SESSION = Event(90.0, "learner", "the learner began session 2 at step 6", "learner", 6)
SETTING = Event(90.0, "change", "rollout.temperature = 2 (was 1), from step 7 on", "learner", 6)
DOWN = Event(90.0, "server", "server v1 went from serving to quarantined: its proof failed", "v1", 5)
LONG_AGO = Event(1.0, "change", "learner.optim = sgd (was adamw)", "learner", 0)


@pytest.mark.parametrize(
    ("events", "beside", "parts"),
    [
        (
            [LONG_AGO, SESSION, SETTING],
            {},
            ["What changed there: rollout.temperature = 2 (was 1), from step 7 on; "],
        ),
        ([SESSION], {}, ["What changed there: the learner began session 2 at step 6. Look"]),
        ([DOWN], {}, ["What changed there: server v1 went from serving to quarantined"]),
        (
            [],
            {"tools/search/failure_frequency": ([0.0] * 6, [1.0] * 4)},
            ["What changed there: 100% of the calls of tool search fail, before 0%"],
        ),
        (
            [],
            {"rewards/accuracy/mean": (HIGH, LOW), "rewards/format/mean": ([1.0] * 6, [1.0] * 4)},
            ["What changed there: the reward of accuracy fell"],
        ),
        ([], {"rewards/accuracy/mean": (HIGH, LOW)}, ["Nothing that the queue knows of", "--step 7`", "learning_rate"]),
    ],
)
def test_what_changed_is_named_before_the_task(
    events: list[Event], beside: dict[str, tuple[list[float], list[float]]], parts: list[str]
) -> None:
    finder, symptoms = ChangeFinder(), Symptoms(groups_per_step=2)
    for event in events:
        finder.event(event)
    for number, reward in enumerate([*HIGH, *LOW], start=1):
        others = {name: [*high, *low][number - 1] for name, (high, low) in beside.items()}
        finder.step({"step": number, "at": 100.0, "reward": reward, **others})
    for _ in range(20):  # and all rewards of a group are the same since
        symptoms.group_came(GroupOutcome(0.0, True, {"stop": 2}))
    (cause,) = diagnose(symptoms, [], [], config(queue={"max_staleness": 1}), finder)
    assert (cause.about, cause.severity) == ("reward", "bad")
    assert cause.text.startswith("the reward fell from 0.807 to 0.107, from step 7 on. ")
    assert "Meanwhile 20 groups in a row had rewards that are all equal" in cause.text
    assert [part for part in parts if part not in cause.text] == [], cause.text
    assert "too hard" not in cause.text
    for number, reward in enumerate(HIGH, start=20):
        finder.step({"step": number, "at": 100.0, "reward": reward})
    assert [cause.about for cause in diagnose(symptoms, [], [], config(), finder)] == ["rewards"]


def test_a_fall_is_known_to_a_queue_that_starts_again(tmp_path: Path) -> None:
    first = History(tmp_path / "history", 10**9)
    for number, reward in enumerate([*HIGH, *LOW], start=1):
        changed = ["task.path = b.py:task (was a.py:task)"] if number > 6 else []
        learner = LearnerStatus(1 + (number > 6), number, number, changed=changed, metrics={"reward": reward})
        change = first.add(status(step=number, learner=learner), 10.0 * number)
    assert [event.text for event in change.events if event.kind == "change"] == []
    told = [(event.step, event.text) for event in first.events if event.kind == "change"]
    assert told == [
        (7, "task.path = b.py:task (was a.py:task), from step 8 on"),
        (7, "the reward fell from 0.807 to 0.107, from step 7 on"),
    ]
    first.close()
    again = History(tmp_path / "history", 10**9)
    again.load()
    assert again.changes.fall == first.changes.fall
    assert again.changes.explanations(4) == first.changes.explanations(4)
