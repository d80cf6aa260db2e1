"""Conversations as a person reads them: within a bound, whatever is in them."""

import collections
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_worker.group import MAX_BYTES, MAX_TEXT, of_prompt, transcript

USER = {"role": "user", "content": "Multiply 2 by 3."}
SAID = {"role": "assistant", "content": "6"}


def read(data):
    """As the queue and the command line read it."""
    return msgspec.json.decode(data, type=list[dict])


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return {"role": "assistant", "content": "", "tool_calls": value}


class Odd:
    def __str__(self):
        raise SystemExit

    __repr__ = __str__


def test_the_prompt_comes_first():
    assert read(transcript(of_prompt([USER]), [SAID])) == [USER, SAID]
    assert read(transcript(of_prompt("2 by 3 is"), [SAID])) == [{"role": "prompt", "content": "2 by 3 is"}, SAID]


def test_a_message_may_be_any_mapping():
    assert read(transcript(of_prompt([collections.UserDict(USER)]), [SAID])) == [USER, SAID]


def test_a_long_text_keeps_its_beginning_and_its_end():
    (message,) = read(transcript([], [{"role": "tool", "content": "a" * 50_000 + "b" * 50_000}]))
    assert message["content"].startswith("aaa")
    assert message["content"].endswith("bbb")
    assert f"({100_000 - MAX_TEXT} characters left out)" in message["content"]


def test_a_long_conversation_keeps_its_beginning_and_its_end():
    messages = [{"role": "tool", "content": f"{number} " + "x" * 1000} for number in range(200)]
    data = transcript(of_prompt([USER]), messages)
    kept = read(data)
    assert len(data) <= MAX_BYTES
    assert kept[:2] == [USER, messages[0]]
    assert kept[-1] == messages[-1]
    (note,) = (message for message in kept if message["role"] == "note")
    assert note["content"] == f"{201 - (len(kept) - 1)} messages left out"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": Odd()},
        {"role": "user", ("a", "b"): 1},
        {"role": "assistant", "content": "\ud800"},
        {"role": "assistant", "content": "x", "arguments": float("nan")},
        nested(100_000),
        {"role": "assistant", "tool_calls": "y" * 10**6},
    ],
    ids=["object", "key", "surrogate", "nan", "deep", "huge"],
)
def test_i9_whatever_a_message_holds_the_rest_can_be_read(message):
    data = transcript(of_prompt([USER]), [message, SAID])
    assert len(data) <= MAX_BYTES
    kept = read(data)
    assert (kept[0], len(kept), kept[-1]) == (USER, 3, SAID)


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text() | st.integers() | st.floats(), max_size=3), max_size=5))
def test_any_messages_become_json(messages):
    kept = read(transcript([], messages))
    assert len(kept) == len(messages)
    json.dumps(kept, allow_nan=False)


@given(st.lists(st.integers(0, 40_000), max_size=30))
def test_no_conversation_exceeds_the_bound(sizes):
    data = transcript(of_prompt([USER]), [{"role": "tool", "calls": "\x00" * size} for size in sizes])
    assert len(data) <= MAX_BYTES
    assert read(data)[0] == USER
