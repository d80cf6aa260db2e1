"""What sharded ranks do together holds signals back, and lets go of them however it ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed

from slipstream.learner.ranks.liveness import RankLost
from slipstream.learner.ranks.stopping import Stop, Stopped
from slipstream.learner.ranks.team import Parted, Team

dist: Any = torch.distributed


class Failed(Exception):
    """As a step whose loss is not finite, or a full disk."""


@pytest.fixture
def stop() -> Iterator[Stop]:
    with Stop(20.0) as stop:
        yield stop


@pytest.fixture
def team(stop: Stop) -> Iterator[Team]:
    team = Team(0, 2, dist.HashStore(), sharded=True)
    team.guard(stop)
    yield team
    team.close()


@pytest.mark.parametrize("change", [False, True])
def test_a_failure_lets_go_of_signals(team: Team, change: bool) -> None:
    with pytest.raises(Failed), team.together("step", change=change):
        raise Failed
    with pytest.raises(Stopped) as stopped:
        signal.raise_signal(signal.SIGTERM)
    assert not stopped.value.halfway


@pytest.mark.parametrize("change", [False, True])
def test_a_signal_that_came_before_the_failure_is_heeded_after_it(team: Team, change: bool) -> None:

    def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise Failed

    with pytest.raises(Stopped) as stopped, team.together("step", change=change):
        work()
    assert not stopped.value.halfway
    with team.together("save_model"):
        """The others were not left half-way: a checkpoint can be written."""


def test_a_connection_that_breaks_is_told_as_the_rank_that_has_gone(team: Team) -> None:
    assert team.alarm is not None
    alarm = team.alarm

    def work() -> None:
        alarm.lost("rank 1 has gone")
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RankLost, match="rank 1 has gone"), team.together("step", change=True):
        work()
    with pytest.raises(RankLost, match="rank 1 has gone"), team.together("step", change=True):
        raise AssertionError("nothing more is done together")
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)
    # As a disk that cannot be written to: the run ends for the signal, and says why there is no checkpoint.
    with pytest.raises(Parted, match="rank 1 has gone"), team.together("save_model"):
        raise AssertionError("nothing more is done together")
