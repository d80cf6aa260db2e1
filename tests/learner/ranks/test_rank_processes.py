"""Ranks as processes: none outlives the learner, none is waited for in vain, none is told in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.learner.feed.packing import pack
from slipstream.learner.ranks import liveness
from slipstream.learner.ranks.liveness import RankLost
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import RunConfig
from tests.kit import LEARNER, config
from tests.kit.learner import sample, step_rollouts
from tests.kit.model import save_tiny_model
from tests.kit.ranks import Ranks

GONE_WITHIN_S = 60.0
TIMEOUT_S = 15.0
# How often a rank's silence is taken to be so long as it is, where a test waits for its end.
FASTER = 5.0
# As the follower is run, but for what it does.
FAILS = """
import sys
from slipstream.learner import run
from slipstream.learner.__main__ import follow_rank_0
from slipstream.protocol.config import ConfigError

def follow(here):
    raise ConfigError("model.path = nowhere")

run.follow = follow
sys.exit(follow_rank_0())
"""


@pytest.fixture
def run_file(tmp_path: Path) -> RunConfig:
    path = str(save_tiny_model(tmp_path / "model"))
    return config(
        LEARNER, model={"path": path}, run={"dir": str(tmp_path)}, learner={"ranks": 2, "rank_timeout_s": TIMEOUT_S}
    )


@pytest.fixture
def ranks(run_file: RunConfig) -> Iterator[Ranks]:
    with Ranks(run_file) as ranks:
        yield ranks


def impatient(_: int) -> None:
    """Have this rank lose its patience sooner, and beat more often."""
    lost = liveness.lost
    liveness.lost = lambda silences, timeout_s, signalled: lost(silences, timeout_s / FASTER, signalled)
    liveness.BEAT_EVERY_S /= FASTER
    liveness.ANSWERS_WITHIN_S /= FASTER


@pytest.fixture
def impatient_ranks(run_file: RunConfig) -> Iterator[Ranks]:
    with Ranks(run_file, first=impatient) as ranks:
        yield ranks


def followers(_: PolicyTrainer) -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def own_pid(_: PolicyTrainer) -> int:
    return os.getpid()


def listeners(trainer: PolicyTrainer) -> list[str]:
    """Addresses that rank 0 and its children listen on."""
    processes = [psutil.Process(), *psutil.Process().children()]
    found = [connection for process in processes for connection in process.net_connections("tcp")]
    return [connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN]


def step(trainer: PolicyTrainer) -> str | None:
    samples = [sample(30, 5, i, rollout=i) for i in range(4)]
    try:
        trainer.step(pack(samples, 64), step_rollouts(samples))
    except RankLost as lost:
        return str(lost)
    return None


def step_without_a_follower(trainer: PolicyTrainer) -> tuple[str | None, list[Any]]:
    told: list[Any] = []
    trainer.team.on_lost(told.append)
    (pid,) = followers(trainer)
    psutil.Process(pid).send_signal(signal.SIGKILL)
    return step(trainer), told


def step_with_a_follower_that_hangs(trainer: PolicyTrainer) -> str | None:
    (pid,) = followers(trainer)
    psutil.Process(pid).suspend()
    return step(trainer)


def test_a_rank_that_hangs_ends_the_step_by_name(impatient_ranks: Ranks) -> None:
    assert impatient_ranks.call(step) is None
    (pid,) = impatient_ranks.call(followers)
    follower = psutil.Process(pid)
    said = impatient_ranks.call(step_with_a_follower_that_hangs)
    assert f"rank 1 of the learner (process {pid} on " in said
    assert f"(learner.rank_timeout_s = {TIMEOUT_S:g})" in said
    follower.wait(GONE_WITHIN_S)


def test_a_rank_ends_when_rank_0_hangs(impatient_ranks: Ranks) -> None:
    """The store, which rank 0 holds, hangs with it."""
    (pid,) = impatient_ranks.call(followers)
    follower, rank_0 = psutil.Process(pid), psutil.Process(impatient_ranks.call(own_pid))
    rank_0.suspend()
    try:
        deadline = time.monotonic() + GONE_WITHIN_S
        while follower.status() != psutil.STATUS_ZOMBIE:  # rank 0, its parent, cannot take note of it
            assert time.monotonic() < deadline, "it waits for rank 0"
            time.sleep(0.2)
    finally:
        rank_0.kill()


def test_the_exit_code_of_a_follower_that_fails_survives() -> None:
    """Rank 0 holds its standard input, which a thread of it reads."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "WORLD_SIZE": "2", "RANK": "1"}
    command = [sys.executable, "-c", FAILS]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(GONE_WITHIN_S) == 2
    assert said == "learner: rank 1: model.path = nowhere\n"


def test_a_rank_that_still_loads_ends_with_rank_0() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "WORLD_SIZE": "2", "RANK": "1"}
    command = [sys.executable, "-m", "slipstream.learner", "--rank"]
    assert subprocess.run(command, env=env, stdin=subprocess.DEVNULL, timeout=GONE_WITHIN_S).returncode == 0


def test_a_rank_that_dies_ends_the_step_by_name(ranks: Ranks) -> None:
    assert ranks.call(step) is None
    said, told = ranks.call(step_without_a_follower)
    assert "rank 1 of the learner" in said
    assert (
        "was ended from outside, by SIGKILL: where nobody did that, the machine was most likely out of memory" in said
    )
    assert "the learner's log" not in said, "it stands there, and nothing else of this rank does"
    assert [str(lost) for lost in told] == [said], "whoever waits for groups hears of it as well"


def test_no_rank_outlives_a_rank_0_that_is_killed(ranks: Ranks) -> None:
    (pid,) = ranks.call(followers)
    follower = psutil.Process(pid)
    psutil.Process(ranks.call(own_pid)).kill()
    follower.wait(GONE_WITHIN_S)


def test_a_follower_leaves_signals_to_rank_0(ranks: Ranks) -> None:
    (pid,) = ranks.call(followers)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert ranks.call(step) is None


def test_nobody_but_this_machine_can_reach_the_ranks(ranks: Ranks) -> None:
    addresses = ranks.call(listeners)
    assert addresses
    assert set(addresses) == {"127.0.0.1"}


def test_two_teams_beside_each_other_do_not_collide(ranks: Ranks, run_file: RunConfig) -> None:
    with Ranks(run_file) as others:
        assert ranks.call(step) is None
        assert others.call(step) is None
        assert not set(ranks.call(followers)) & set(others.call(followers))
