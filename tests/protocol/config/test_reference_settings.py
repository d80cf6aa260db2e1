"""Settings of the reference model and of the entropy that would do nothing are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.protocol.config import LearnerSection
from slipstream.protocol.config.sections import algorithm
from tests.kit import config


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kl_in_reward": True}, r"learner.kl_in_reward = true does nothing with learner.kl_coef = 0.*set .*kl_coef"),
        ({"kl_bias_correction": False}, r"learner.kl_bias_correction = false does nothing with learner.kl_coef = 0"),
        ({"reference_sync_steps": 8}, r"learner.reference_sync_steps = 8 does nothing with learner.kl_coef = 0"),
        ({"reference_mixup": 0.5}, r"learner.reference_mixup = 0.5 does nothing with learner.kl_coef = 0"),
        (
            {"kl_coef": 0.1, "reference_mixup": 0.5},
            r"learner.reference_mixup = 0.5 does nothing with learner.reference_sync_steps = 0",
        ),
        (
            {"kl_coef": 0.1, "kl_in_reward": True, "kl_bias_correction": False},
            r"kl_bias_correction = false does nothing with learner.kl_in_reward = true",
        ),
        ({"kl_coef": -0.1}, r"kl_coef"),
        ({"kl_coef": 0.1, "reference_sync_steps": 8, "reference_mixup": 0.0}, r"reference_mixup"),
        ({"kl_coef": 0.1, "reference_sync_steps": 8, "reference_mixup": 1.5}, r"reference_mixup"),
        ({"entropy_coef": -0.1}, r"entropy_coef"),
    ],
)
def test_what_would_do_nothing_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        LearnerSection(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_in_reward": True},
        {"kl_coef": 0.1, "kl_bias_correction": False},
        {"kl_coef": 0.1, "reference_sync_steps": 8, "reference_mixup": 1.0},
        {"entropy_coef": 0.01},
    ],
)
def test_what_does_something_is_read_again_as_it_was_printed(settings: dict[str, Any]) -> None:
    section = LearnerSection(**settings)
    assert LearnerSection.model_validate(section.model_dump()) == section


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_reference_that_could_not_move_for_rounding_is_refused(dtype: str) -> None:
    """Half-way to the next number is the least step that is not rounded back."""
    settings = {"kl_coef": 0.1, "reference_sync_steps": 1, "reference_mixup": 0.1}
    with pytest.raises(ValidationError, match=rf"reference_mixup = 0.1 with model.dtype = {dtype}: .*at least 0.5"):
        config(learner=settings, model={"dtype": dtype})
    config(learner=settings)
    config(learner={**settings, "reference_mixup": 0.6}, model={"dtype": dtype})


def test_a_preset_may_say_where_the_kl_goes_before_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does nothing until somebody sets `kl_coef`."""
    monkeypatch.setitem(algorithm.PRESETS, "dr_grpo", {"kl_in_reward": True})
    section = LearnerSection(algorithm="dr_grpo")
    assert (section.kl_in_reward, section.kl_coef) == (True, 0.0)
    assert LearnerSection.model_validate(section.model_dump()) == section
    assert LearnerSection(algorithm="dr_grpo", kl_coef=0.05).kl_in_reward
