import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.chat.base import MalformedCall, ToolCall
from rollout_worker.chat.parsers.hermes import parse

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def test_a_call_and_what_is_said_besides():
    turn = parse(f"I will ask.\n{CALL}")
    assert turn.calls == [ToolCall("f", {"a": 1})]
    assert turn.content == "I will ask."
    assert turn.message()["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


def test_several_calls_keep_their_order():
    turn = parse(CALL + '\n<tool_call>\n{"name": "g"}\n</tool_call>')
    assert turn.calls == [ToolCall("f", {"a": 1}), ToolCall("g", {})]
    assert turn.content == ""


@pytest.mark.parametrize("text", ["408", "", "a < b and b > c", "<think>use <tool_call>{}</tool_call></think>408"])
def test_no_call_leaves_the_text_as_it_is(text):
    turn = parse(text)
    assert turn.calls == []
    assert turn.message() == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "f"', "not closed"),
        ("<tool_call>multiply(1, 2)</tool_call>", "not valid JSON"),
        ("<tool_call>[1, 2]</tool_call>", "JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "JSON object"),
        ('<tool_call>{"name": 3}</tool_call>', "JSON object"),
        ('<tool_call>{"name": "f", "arguments": "a=1"}</tool_call>', '"arguments"'),
        ('{"name": "f", "arguments": {}}</tool_call>', "without <tool_call>"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_a_malformed_call_is_told_from_no_call(text, reason):
    (call,) = parse(text).calls
    assert isinstance(call, MalformedCall)
    assert reason in call.reason
    assert parse(text).content == text


def test_a_malformed_call_does_not_hide_a_good_one():
    turn = parse(f"<tool_call>oops{CALL}")
    assert [type(call) for call in turn.calls] == [MalformedCall, ToolCall]


@given(st.text(alphabet='<>/tool_ca{}":f1 ', max_size=200))
def test_any_text_can_be_parsed(text):
    for call in parse(text).calls:
        assert isinstance(call, ToolCall | MalformedCall)
