"""How long a group may take, and who must be more patient than that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.config import RunConfig, checks
from tests.kit import config

seconds = st.floats(1.0, 10_000.0)


def check(run: RunConfig, environments: bool) -> None:
    checks.check_patience(run.queue, run.worker, run.learner, environments)


def test_every_default_is_patient_enough_for_environments() -> None:
    run = config()
    check(run, environments=True)
    assert run.ticket_max_age_s == 4080.0


@given(seconds, seconds, seconds)
def test_auto_outlasts_whatever_a_group_in_an_environment_may_take(
    making: float, episode: float, reward: float
) -> None:
    """The environment is made and reset; both it and reward functions reward."""
    worker = {"environment_timeout_s": making, "episode_timeout_s": episode, "reward_timeout_s": reward}
    run = config(worker=worker, learner={"stall_timeout_s": 100_000.0})
    check(run, environments=True)
    assert run.ticket_max_age_s >= 2 * making + episode + 2 * reward


def test_a_slow_reset_is_no_longer_than_its_ticket() -> None:
    run = config(worker={"environment_timeout_s": 60.0, "episode_timeout_s": 5.0, "reward_timeout_s": 5.0})
    assert run.ticket_max_age_s == 140.0


@pytest.mark.parametrize(
    ("sections", "least", "told"),
    [
        (
            {"queue": {"ticket_max_age_s": 2159.0}},
            2160.0,
            r"queue\.ticket_max_age_s = 2159 is less than .* to 2160 or more, or",
        ),
        ({"learner": {"stall_timeout_s": 2280.0}}, 2281.0, r"learner\.stall_timeout_s = 2280 is not .* above 2280, or"),
    ],
)
def test_what_is_enough_without_environments_is_too_little_with_them(sections, least, told) -> None:
    """So a run without any need not care for `worker.environment_timeout_s`."""
    run = config(**sections)
    with pytest.raises(ValueError, match=f"{told} lower worker.environment_timeout_s or"):
        check(run, environments=True)
    ((section, settings),) = sections.items()
    check(config(**{section: dict.fromkeys(settings, least)}), environments=True)
