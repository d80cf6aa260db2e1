"""A rollout as a person reads it."""

from __future__ import annotations

import msgspec
import pytest

from slipstream.protocol.rollouts import MAX_TEXT, RolloutView
from tests.kit import group


def test_a_view_says_who_sampled_it_and_when() -> None:
    view = RolloutView.of(group("3.0", (0.5, 1.0), [None, 4, 4, 5], worker_id="a worker"), 1)
    assert (view.ticket_id, view.number, view.worker_id, view.reward) == ("3.0", 1, "a worker", 1.0)
    assert (view.versions, view.sampled_tokens, view.messages, view.step) == ((4, 5), 3, None, None)
    assert msgspec.json.decode(msgspec.json.encode(view), type=RolloutView) == view


def test_long_texts_are_cut() -> None:
    made = group()
    messages = [{"role": "assistant", "content": "x" * (MAX_TEXT + 7)}, {"role": "tool", "content": "short"}]
    made.rollouts[0].messages = msgspec.json.encode(messages)
    long, short = RolloutView.of(made, 0).messages or []
    assert long["content"] == "x" * MAX_TEXT + "... (7 more characters)"
    assert short == messages[1]


@pytest.mark.parametrize("messages", [b"", b"\xff", b"{}", b"[1]", b"[" * 100_000])
def test_what_is_not_messages_is_not_shown(messages: bytes) -> None:
    made = group()
    made.rollouts[0].messages = messages
    assert RolloutView.of(made, 0).messages is None


def test_what_a_reward_noted_is_shown_and_cut() -> None:
    made = group()
    made.rollouts[0].extra = {"gold": "6", "long": "x" * (MAX_TEXT + 7)}
    assert RolloutView.of(made, 0).extra == {"gold": "6", "long": "x" * MAX_TEXT + "... (7 more characters)"}
    assert RolloutView.of(made, 1).extra == {}
