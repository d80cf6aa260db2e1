"""Rollouts that the learner wrote are found by the queue's page, as the file grows, is cut or is replaced."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slipstream.protocol import rollouts as module
from slipstream.protocol.rollouts import RolloutView, TokenView, TrainedRollouts


def view(number: int) -> RolloutView:
    counts = dict.fromkeys(("turns", "tool_calls", "tool_failures", "sampled_tokens"), 1)
    tokens = [TokenView("a", 1, -0.5, -0.25, 1)]
    return RolloutView(
        f"{number}.0", number, 0, 0, "w", 0.5, {}, "stop", versions=(1, 1), step=number, tokens=tokens, **counts
    )


def line(number: int) -> bytes:
    return msgspec.json.encode(view(number)) + b"\n"


def test_what_is_new_is_found_once_through_half_lines_and_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    rollouts = TrainedRollouts(path)
    assert rollouts.look() == []
    path.write_bytes(line(0) + line(1) + line(2)[:30])
    assert rollouts.look() == [view(0), view(1)]
    with path.open("ab") as file:
        file.write(line(2)[30:] + b"no rollout\n")
    assert rollouts.look() == [view(2)]
    assert rollouts.look() == []
    (tmp_path / "new").write_bytes(line(2) + line(3))
    (tmp_path / "new").replace(path)
    assert rollouts.look() == [view(3)]
    path.write_bytes(line(1))  # a resume took steps back
    assert rollouts.look() == []
    with path.open("ab") as file:
        file.write(line(9))
    assert rollouts.look() == [view(9)]
    assert [rollout.index for rollout in rollouts.newest] == [0, 1, 2, 3, 9]


def test_of_a_long_file_the_end_is_read_and_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_READ", 10_000)
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"".join(map(line, range(1000))))
    rollouts = TrainedRollouts(path)
    found = [rollout.index for rollout in rollouts.look()]
    assert found == list(range(found[0], 1000))
    assert 10 < len(found) < 100
