"""Good rollouts as conversations to learn from: which are written, which are skipped and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.deploy.commands import demos as command
from slipstream.deploy.commands.demos import (
    CONTINUED,
    CUT_SHORT,
    IMAGES,
    NOT_KEPT,
    TEXT,
    UNENDED,
    Kept,
    conversation_of,
    demos,
)
from slipstream.protocol import codec
from slipstream.protocol.config import ConfigError
from slipstream.protocol.rollouts import FILE_NAME, TURN_REWARD, RolloutView
from slipstream.protocol.trained_record import RECORD_FOLDER, RECORD_MAGIC, Head, record_part, write_entry
from tests.kit.messages import group

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 by 3?"}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "multiply", "arguments": {"a": 2}}}],
}
ANSWER = {"role": "tool", "name": "multiply", "content": "6"}
SAYS = {"role": "assistant", "content": "6"}
SHOWN = [SYSTEM, USER, SAYS, USER]  # an example in the prompt


def test_the_policys_turns_are_the_last_ones() -> None:
    found = conversation_of(Kept(1.0, "stop", 2, [*SHOWN, CALLING, ANSWER, SAYS]))
    assert found == {"prompt": SHOWN, "completion": [CALLING, ANSWER, SAYS], "reward": 1.0}
    cut_off = conversation_of(Kept(0.5, "turn_limit", 1, [USER, CALLING, ANSWER]))
    assert cut_off == {"prompt": [USER], "completion": [CALLING], "reward": 0.5}


@pytest.mark.parametrize(
    ("reason", "turns", "messages", "why"),
    [
        ("stop", 1, None, NOT_KEPT),
        ("length", 1, [USER, SAYS], UNENDED),
        ("timeout", 1, [USER, SAYS], UNENDED),
        ("stop", 1, [USER, {"role": "note", "content": "3 messages left out"}, SAYS], CUT_SHORT),
        ("stop", 1, [USER, {"role": "assistant", "content": "a... (9 characters left out) ...b"}], CUT_SHORT),
        ("stop", 1, [{"role": "user", "content": "a... (7 more characters)"}, SAYS], CUT_SHORT),
        ("stop", 2, [USER, SAYS], CUT_SHORT),
        ("stop", 1, [{"role": "prompt", "content": "2 by 3"}, SAYS], TEXT),
        ("stop", 1, [{"role": "user", "content": [{"type": "image", "image": {}}]}, SAYS], IMAGES),
        ("stop", 1, [USER, {"role": "assistant", "content": "2 by 3 is "}, SAYS], CONTINUED),
    ],
)
def test_a_conversation_that_is_not_whole_is_none(reason: str, turns: int, messages: Any, why: str) -> None:
    assert conversation_of(Kept(1.0, reason, turns, messages)) == why


def record_of(run_dir: Path, rewards: list[float]) -> None:
    """Write a record of one step, each group of whose rollouts has these rewards."""
    (run_dir / RECORD_FOLDER).mkdir(parents=True)
    made = group(rewards=rewards)
    for place, rollout in enumerate(made.rollouts):
        said = {"role": "assistant", "content": f"{rollout.reward:g}" if place else "x" * 5000}
        rollout.turns, rollout.finish_reason = 1, "stop"
        rollout.messages = json.dumps([USER, said]).encode()
    payload = codec.encode(made)
    with record_part(run_dir / RECORD_FOLDER, 1).open("wb") as file:
        file.write(RECORD_MAGIC)
        write_entry(file, Head(1, 1, made.ticket_id, "lease", 0, len(payload), groups=1), payload)


def test_the_record_is_read_and_long_texts_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_of(tmp_path, [1.0, 0.2, 0.9])
    out = tmp_path / "demos.jsonl"
    demos(tmp_path, 0.5, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 0.9]
    assert rows[0]["completion"][0]["content"] == "x" * 5000
    assert "2 conversations of 3 rollouts" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is such a file already"):
        demos(tmp_path, 0.5, out)


def test_without_a_record_the_samples_are_taken_and_cut_ones_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_of(tmp_path / "made", [1.0, 0.2, 0.9])
    made = next(iter(command.kept(tmp_path / "made")))
    assert made.messages is not None
    view_of = msgspec.structs.replace
    base = RolloutView("t", 0, 0, 0, "w", 1.0, {}, "stop", 1, 0, 0, 1, None, messages=[USER, SAYS])
    views = [base, base, view_of(base, messages=[USER, {"role": "assistant", "content": "a... (7 more characters)"}])]
    (tmp_path / FILE_NAME).write_bytes(b"".join(msgspec.json.encode(view) + b"\n" for view in views))
    out = tmp_path / "demos.jsonl"
    demos(tmp_path, 1.0, out)
    assert len(out.read_text().splitlines()) == 1
    said = capsys.readouterr().out
    assert "1 conversations of 3 rollouts, each once; skipped: 1 not kept whole" in said


def test_a_run_without_good_rollouts_is_told_with_its_best_reward(tmp_path: Path) -> None:
    record_of(tmp_path, [0.1, 0.2, 0.3])
    with pytest.raises(ConfigError, match=r"--min-reward 0.5: none of the 3 rollouts .* the best reward is 0.3"):
        demos(tmp_path, 0.5, tmp_path / "demos.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"there is neither record nor rollouts\.jsonl"):
        demos(tmp_path / "empty", 0.5, tmp_path / "demos.jsonl")


@pytest.mark.parametrize(("least", "out"), [(float("nan"), "demos.jsonl"), (0.1, "no folder/demos.jsonl")])
def test_what_cannot_be_followed_is_refused_and_nothing_is_written(tmp_path: Path, least: float, out: str) -> None:
    record_of(tmp_path, [0.1, 0.2, 0.3])
    with pytest.raises(ConfigError):
        demos(tmp_path, least, tmp_path / out)
    assert not (tmp_path / out).exists()


def test_a_reward_at_a_turn_is_no_part_of_its_message() -> None:
    found = conversation_of(Kept(1.0, "stop", 1, [USER, {**SAYS, TURN_REWARD: 1.0}]))
    assert found == {"prompt": [USER], "completion": [SAYS], "reward": 1.0}
