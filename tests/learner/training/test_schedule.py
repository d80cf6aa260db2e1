"""The learning rate over a run."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from transformers import get_scheduler

from slipstream.learner.training.optimiser import schedule_factor
from slipstream.protocol.config import ConfigError, LearnerSection
from slipstream.protocol.config.sections.learner import ScheduleName

NEEDED: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
}
NAMES = get_args(ScheduleName)


def section(name: str, **more: Any) -> LearnerSection:
    more.setdefault("lr_scheduler_kwargs", NEEDED.get(name, {}))
    return LearnerSection(**{"steps": 20, "learning_rate": 1e-3, "lr_scheduler_type": name, **more})


@pytest.mark.parametrize("name", NAMES)
def test_without_a_warm_up_the_rates_are_those_of_transformers(name: str) -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    theirs = get_scheduler(name, optimiser, 0, 20, NEEDED.get(name))
    factor = schedule_factor(section(name))
    for step in range(20):
        assert 1e-3 * factor(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimiser.step()
        theirs.step()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "constant"])
def test_a_warm_up_loses_no_step_and_ends_at_the_whole_rate(name: str) -> None:
    factor = schedule_factor(section(name, warmup_steps=4))
    rates = [factor(step) for step in range(4)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_the_default_is_that_of_earlier_releases_to_the_bit() -> None:
    factor = schedule_factor(LearnerSection(warmup_steps=7))
    assert [factor(step) for step in range(9)] == [*((step + 1) / 7 for step in range(7)), 1.0, 1.0]
    assert {schedule_factor(LearnerSection())(step) for step in range(200)} == {1.0}


@pytest.mark.parametrize(
    ("learner", "says"),
    [
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}, "lr_end.*must be smaller"),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 4, "decay_type": "x"},
            },
            "Unknown decay type: x",
        ),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 2}}, "unexpected .*'num_cycle'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "min_lr.*min_lr_rate.*should be set"),
        ({"lr_scheduler_type": "cosine_warmup_with_min_lr"}, "min_lr.*min_lr_rate.*should be set"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
    ],
    ids=str,
)
def test_what_transformers_refuses_is_told_with_the_settings(learner: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner.lr_scheduler_type = .*cannot be made: .*{says}"):
        schedule_factor(LearnerSection(**learner))
