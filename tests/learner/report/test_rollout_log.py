"""`rollouts.jsonl` and which rollouts get there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.feed.rollout_metrics import RolloutPosition, choose
from slipstream.learner.report.rollouts import RolloutLog
from slipstream.protocol.rollouts import RolloutView
from tests.kit import group


def view(step: int) -> RolloutView:
    return msgspec.structs.replace(RolloutView.of(group(f"t{step}"), 0), step=step, staleness=0, advantage=0.5)


def steps_in(path: Path) -> list[int | None]:
    return [msgspec.json.decode(line, type=RolloutView).step for line in path.read_bytes().splitlines()]


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    RolloutLog(path, 0).append([view(1), view(1)])
    assert [msgspec.json.decode(line, type=RolloutView) for line in path.read_bytes().splitlines()] == [view(1)] * 2


@pytest.mark.parametrize("torn", [b"", b'{"ticket_id":"t4", "st', b'{"step":3}', b"\xff\n"])
def test_a_resume_forgets_what_was_written_after_its_step(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(path, 0)
    for step in (1, 2, 3):
        log.append([view(step)])
    with path.open("ab") as file:
        file.write(torn)
    RolloutLog(path, 3)
    assert steps_in(path) == [1, 2, 3]
    RolloutLog(path, 2).append([view(3)])
    assert steps_in(path) == [1, 2, 3]
    RolloutLog(path, 0)
    assert steps_in(path) == []


def test_the_file_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    path, most = tmp_path / "rollouts.jsonl", 4000
    log = RolloutLog(path, 0, max_bytes=most)
    for step in range(1, 101):
        log.append([view(step)])
        assert path.stat().st_size <= most
        assert steps_in(path)[-1] == step
    kept = steps_in(path)
    assert kept == list(range(101 - len(kept), 101)), "whole lines, none left out"
    assert len(path.read_bytes()) > most // 4


def test_one_step_that_is_larger_than_the_bound_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(path, 0, max_bytes=100)
    log.append([view(1)])
    log.append([view(2)])
    assert steps_in(path) == []


def test_best_and_worst_come_first_then_one_of_each_other_group() -> None:
    rewards = [[0.5, 0.5], [0.9, 0.4], [0.3, 0.1], [0.6, 0.6]]
    best, worst, *others = choose(rewards, 4, turn=0)
    assert (best, worst) == (RolloutPosition(1, 0), RolloutPosition(2, 1))
    assert {place.group for place in others} == {0, 3}


def test_which_rollout_of_a_group_it_is_varies_from_step_to_step() -> None:
    rewards = [[1.0, 1.0], [0.0, 0.0], [0.5, 0.5]]
    assert {choose(rewards, 3, turn=step)[2].rollout for step in range(4)} == {0, 1}


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), max_size=5), st.integers(0, 9), st.integers(0, 99))
def test_no_rollout_is_chosen_twice_and_no_fewer_than_there_are(
    rewards: list[list[float]], count: int, turn: int
) -> None:
    places = choose(rewards, count, turn)
    assert len(places) == len(set(places)) == min(count, sum(len(group) for group in rewards))
    values = [rewards[place.group][place.rollout] for place in places]
    if count:
        assert values[:1] == [max(value for group in rewards for value in group)] if rewards else values == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_cuts_no_line_and_ends_no_step(tmp_path: Path) -> None:
    said: list[str] = []
    log = RolloutLog(tmp_path / "rollouts.jsonl", 0, warn=said.append)
    (tmp_path / "rollouts.jsonl").unlink()
    (tmp_path / "rollouts.jsonl").symlink_to("/dev/full")
    for step in (1, 2):
        log.append([view(step)])
    assert [text.split("jsonl ")[1] for text in said] == [
        "lacks rollouts, which cannot be written: No space left on device"
    ]
