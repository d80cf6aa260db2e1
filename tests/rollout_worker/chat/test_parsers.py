"""Every notation of tool calls: what is a call, what is a malformed one, what is none, on any text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.parser_choice import same_value
from slipstream.rollout_worker.chat.parsers import NAMES, Before, Thought, base, by_name, tagged_calls
from slipstream.rollout_worker.chat.parsers.base import MAX_CALLS, UNCLOSED_THOUGHT, CallFinder, MalformedCall, ToolCall
from slipstream.rollout_worker.chat.parsers.custom import ResponseTemplate, load_own
from tests.kit.fake_vllm.tokenizer import build_tokenizer

NOTHING = Before()
SEPARATE = Thought(separate=True)
# By notation: a call of `f` with a = 1 and s = "x", and what the notation makes of the arguments.
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "x"}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm4": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:f{a:1,s:<|"|>x<|"|>}<tool_call|>',
    "lfm2_pythonic": "<|tool_call_start|>[f(a=1, s='x')]<|tool_call_end|>",
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "s": "x"}, "id": "abcDEF123"}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1, "s": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1, "s": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
    '<parameter name="s">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1, "s": "x"}}]'
    "<|END_ACTION|>",
    "phi4": '<|tool_call|>[{"name": "f", "arguments": {"a": 1, "s": "x"}}]<|/tool_call|>',
    "nemotron_json": '<TOOLCALL>[{"name": "f", "arguments": {"a": 1, "s": "x"}}]</TOOLCALL>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1, "s": "x"}}',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1, "s": "x"}',
    "atem": ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n'
    '<atem:parameter name="a">1</atem:parameter>\n<atem:parameter name="s">x</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>",
}
IDS = {"mistral": "abcDEF123", "kimi": "functions.f:0"}
# Other ways of writing a good call.
VARIANTS = [
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1, "s": "x"}}</tool_call>'),
    ("qwen3_xml", "<function=f><parameter=a>1</parameter><parameter=s>x</parameter></function>"),
    ("lfm2_pythonic", '<|tool_call_start|>f(a=1, s="x")<|tool_call_end|>'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1, "s": "x"}'),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]short[ARGS]{"a": 1, "s": "x"}'),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1, "s": "x"}<｜tool▁call▁end｜>'),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1, "s": "x"}}'),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1, "s": "x"}'),
]
MALFORMED = [
    ("hermes", '<tool_call>{"name": "f"', "not closed"),
    ("hermes", "<tool_call>f(1, 2)</tool_call>", "not valid JSON"),
    ("hermes", "<tool_call>[1]</tool_call>", "JSON object"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "JSON object"),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', "JSON object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments"'),
    ("hermes", '{"name": "f", "arguments": {}}</tool_call>', "was not opened"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
    ("qwen3_xml", "<tool_call>\nf(1)\n</tool_call>", "names no function"),
    ("qwen3_xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "value of 'a' is not closed"),
    ("qwen3_xml", "<tool_call><function=f>a = 1</function></tool_call>", "continues with 'a = 1"),
    ("glm4", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>", "not closed"),
    ("glm4", "<tool_call></tool_call>", "names no function"),
    ("gemma4", "<|tool_call>f(a=1)<tool_call|>", "names no function"),
    ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", "expected a value"),
    ("gemma4", "<|tool_call>call:f{a:1}", "does not follow"),
    ("lfm2_pythonic", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "an argument is key=value"),
    ("lfm2_pythonic", "<|tool_call_start|>[f(a='x)]<|tool_call_end|>", "not closed"),
    ("lfm2_pythonic", "<|tool_call_start|>[f(a=" + "[" * 1000 + "<|tool_call_end|>", "nested too deeply"),
    ("mistral", "[TOOL_CALLS] f(1)", "not valid JSON"),
    ("deepseek", "<｜tool▁call▁begin｜><｜tool▁call▁end｜>", "names no function"),
    ("deepseek", "<｜tool▁call▁begin｜>f\n{<｜tool▁call▁end｜>", "not valid JSON"),
    (
        "kimi",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[1]<|tool_call_end|>",
        "must be a JSON object",
    ),
    ("minimax", '<minimax:tool_call><invoke name="f">1</invoke></minimax:tool_call>', "continues with '1</invoke>"),
    ("cohere", '<|START_ACTION|>[{"name": "f"}]<|END_ACTION|>', '"tool_name"'),
    ("phi4", "<|tool_call|>f<|/tool_call|>", "not valid JSON"),
    ("nemotron_json", "<TOOLCALL>f</TOOLCALL>", "not valid JSON"),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}', "not valid JSON"),
    ("llama3_json", "<|python_tag|>{1}", "not valid JSON"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>a = 1", "not valid JSON"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{} and more", "stands 'and more'"),
    ("atem", " to=f<|message|>a = 1", "holds no"),
]
NO_CALL = ["408", "", "a < b and b > c", '{"answer": 408}', '{"name": "Bob", "age": 3}', "[1, 2]", "f(a=1)", "\n\n408 "]
NO_CALL += [
    'It is {"name": "Bob", "id": "b1"}.',
    '{"type": "function", "name": "sin"}',
    '{"type": "city", "name": "Rome", "parameters": {}}',
    '{"name": "Ada", "parameters": "none"}',
    '{"name": "router", "arguments": ["-v", 2]}',
]
# What breaks a notation that looks for the next tag only.
VALUES = [
    "</parameter>",
    "</arg_value>",
    "<tool_call>",
    "</tool_call>",
    "</function>",
    "<think>",
    "</think>",
    "<|call|>",
]


def parse(name, text, thought=SEPARATE, before=NOTHING):
    return by_name(name, thought)(text, before)


def test_every_notation_is_tested():
    assert set(CALLS) == set(NAMES)


@pytest.mark.parametrize(("name", "text"), [*CALLS.items(), *VARIANTS])
def test_a_call_is_read(name, text):
    turn = parse(name, text)
    (call,) = turn.calls
    assert isinstance(call, ToolCall)
    assert call.name == "f"
    assert same_value({"a": 1, "s": "x"}, call.arguments)
    assert call.id == (IDS.get(name) if text == CALLS[name] else None)
    assert (turn.text, turn.content) == (text, "")


@pytest.mark.parametrize("name", NAMES)
def test_the_notations_without_quotes_around_text_say_so(name):
    (call,) = parse(name, CALLS[name]).calls
    assert call.as_text == (name in ("qwen3_xml", "glm4", "minimax", "atem"))
    assert call.as_text == (call.arguments["a"] == "1")


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"harmony", "atem"}))
def test_what_is_said_besides_is_content_and_several_calls_keep_their_order(name):
    # Mistral's list takes all that follows its tag.
    another = CALLS[name].replace("f", "g", 1) if name == "llama3_json" else CALLS[name]
    turn = parse(name, f"I will ask.\n{CALLS[name]}\n{another}")
    assert len(turn.calls) == 2
    assert all(isinstance(call, ToolCall) for call in turn.calls)
    assert turn.content == "I will ask."


def test_a_message_of_harmony_and_of_atem_is_reasoning_or_content_or_a_call():
    turn = parse(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I will ask.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": 1}',
    )
    assert (turn.reasoning, turn.content, turn.calls) == ("Hm.", "I will ask.", [ToolCall("f", {"a": 1})])
    turn = parse(
        "atem",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n"
        '<atem:invoke name="f">\n</atem:invoke>\n</atem:function_calls>',
    )
    assert (turn.reasoning, turn.content, turn.calls) == ("Hm.", "", [ToolCall("f", {})])
    assert parse("harmony", "<|channel|>final<|message|>408").content == "408"
    assert parse("atem", " to=user<|message|>408").content == "408"


@pytest.mark.parametrize(("name", "text", "reason"), MALFORMED)
def test_a_malformed_call_is_told_from_no_call_and_stays_in_the_content(name, text, reason):
    turn = parse(name, text)
    (call,) = turn.calls
    assert isinstance(call, MalformedCall)
    assert reason in call.reason
    if name not in ("harmony", "atem"):
        assert turn.content == text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", NO_CALL)
def test_no_call_leaves_the_text_as_it_is(name, text):
    turn = parse(name, text)
    assert turn.calls == []
    assert turn.message() == {"role": "assistant", "content": text}


def test_a_malformed_call_does_not_hide_a_good_one():
    turn = parse("hermes", f"<tool_call>oops{CALLS['hermes']}")
    assert [type(call) for call in turn.calls] == [MalformedCall, ToolCall]
    turn = parse("qwen3_xml", f"<tool_call>oops</tool_call>{CALLS['qwen3_xml']}")
    assert [type(call) for call in turn.calls] == [MalformedCall, ToolCall]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{{"name": "f", "arguments": {{"s": {json}}}}}</tool_call>'),
        ("qwen3_xml", "<tool_call><function=f><parameter=s>\n{value}\n</parameter></function></tool_call>"),
        ("glm4", "<tool_call>f<arg_key>s</arg_key><arg_value>{value}</arg_value></tool_call>"),
        ("gemma4", '<|tool_call>call:f{{s:<|"|>{value}<|"|>}}<tool_call|>'),
        ("lfm2_pythonic", "<|tool_call_start|>[f(s='{value}')]<|tool_call_end|>"),
        ("mistral", '[TOOL_CALLS][{{"name": "f", "arguments": {{"s": {json}}}}}]'),
        ("llama3_json", '{{"name": "f", "parameters": {{"s": {json}}}}}'),
        ("minimax", '<invoke name="f"><parameter name="s">{value}</parameter></invoke>'),
    ],
)
def test_a_tag_inside_an_argument_is_an_argument(name, text, value):
    turn = parse(name, text.format(value=value, json=json.dumps(value)))
    assert turn.calls == [ToolCall("f", {"s": value})]
    assert turn.reasoning is None


def test_arguments_that_are_text_are_the_tools_to_read():
    turn = parse("hermes", '<tool_call>{"name": "f", "arguments": "a=1"}</tool_call>')
    assert turn.calls == [ToolCall("f", "a=1")]


def test_i9_half_a_surrogate_pair_is_replaced_and_a_whole_one_kept():
    turn = parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800", "b": "\\ud83d\\ude42"}}</tool_call>')
    assert turn.calls == [ToolCall("f", {"a": "\ufffd", "b": "🙂"})]
    turn = parse("lfm2_pythonic", "<|tool_call_start|>[f(a='\\ud800', b='\\ud83d\\ude42')]<|tool_call_end|>")
    assert turn.calls == [ToolCall("f", {"a": "\ufffd", "b": "🙂"})]


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"harmony", "atem"}))
def test_i9_a_call_inside_a_thought_is_not_a_call_and_a_failed_attempt_where_the_thought_is_not_closed(name):
    call = CALLS[name]
    for said, text in [
        ("", f"<think>I could {call}"),
        ("", f"<think>I could {call}</think>408"),
        ("<think>\n", f"I could {call}"),
        ("<think>\n", f"I could {call}</think>408"),
        ("", f"Well. <think>I could {call}</think>408"),
    ]:
        calls = [] if "</think>" in text else [UNCLOSED_THOUGHT]
        turn = parse(name, text, before=Before(said, said))
        assert turn.calls == calls
        assert call in turn.reasoning
        assert "408" not in turn.reasoning
        if name in ("gemma4", "cohere"):  # whose own tags of thought are known
            continue
        untold = parse(name, text, Thought(), Before(said, said))
        assert (untold.calls, untold.content, untold.reasoning) == (calls, text, None)


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"harmony", "atem"}))
def test_i9_a_thought_without_a_call_that_is_not_closed_is_no_attempt(name):
    assert parse(name, "<think>I could ask").calls == []


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"harmony", "atem"}))
def test_a_call_after_a_thought_is_a_call(name):
    for said, text in [("", "<think>Hm.</think>"), ("<think>\n", "Hm.\n</think>\n\n"), ("<think>\n\n</think>\n\n", "")]:
        turn = parse(name, text + CALLS[name], before=Before(said, said))
        assert [call.name for call in turn.calls] == ["f"]
        assert turn.reasoning == ("Hm." if text else None)
        assert turn.content == ""


def test_i9_a_turn_with_more_calls_than_anybody_needs_is_cut():
    turn = parse("hermes", CALLS["hermes"] * (MAX_CALLS + 5))
    assert len(turn.calls) == MAX_CALLS + 1
    assert isinstance(turn.calls[-1], MalformedCall)


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<think>"),
        *("</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>call:f{", "<tool_call|>"),
        *(
            "<|tool_call_start|>[",
            "<|tool_call_end|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
        ),
        *(
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            '<invoke name="f">',
            "</invoke>",
            "<|start|>",
            "<|end|>",
        ),
        *("<|channel|>analysis", "<|message|>", " to=functions.f", "<|START_ACTION|>", "<TOOLCALL>", '{"name": "f"'),
        *(
            ', "arguments": ',
            ', "parameters": ',
            "f(",
            "a=",
            "'",
            '"',
            '<|"|>',
            "{",
            "}",
            "[",
            "]",
            ")",
            ",",
            ":",
            "\\",
        ),
        *("1", "-", "1e9", "null", "True", "\n", " ", "\\ud800", "\ud800", "é", "x"),
    ]
)


@given(st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=60))
def test_i9_any_text_can_be_parsed(text):
    for name in NAMES:
        for before in (NOTHING, Before("<think>\n", "<think>\n"), Before(text, text)):
            turn = parse(name, text, before=before)
            assert turn.text == text
            assert all(isinstance(call, ToolCall | MalformedCall) for call in turn.calls)
            assert turn.message()["role"] == "assistant"


class CountingSource(CallFinder):
    """Counts the characters that are searched."""

    searched = 0

    def find(self, pattern, at):
        known = self._found.get(pattern)
        found = super().find(pattern, at)
        if self._found[pattern] is not known:
            type(self).searched += (len(self.text) if found is None else found.end()) - at
        return found


HOSTILE = [
    *("<tool_call>", '<tool_call>["', '{"name": ', '{"name":0,"a":', "<tool_call><function=f><parameter=a>"),
    "<parameter=a><tool_call><function=f><parameter=a></parameter>",
    "<arg_key>a</arg_key><arg_value><tool_call>f<arg_key>a</arg_key><arg_value></arg_value>",
    *("<|tool_call_start|>[f(a='", "<|tool_call>call:f{a:{", "[TOOL_CALLS][{", "<｜tool▁call▁begin｜>f\n{"),
    *("<|tool_call_begin|>f<|tool_call_argument_begin|>{", "<|START_ACTION|>[", "<|tool_call|>[", "<TOOLCALL>[{"),
    *('<invoke name="f"><parameter name="a">', "<think>", "<think></think>", "<|start|>", "<|channel|>", " ", "' "),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        ("", ""),
        ("<tool_call><function=f>", ""),
        ("<tool_call><function=f>", "<parameter="),
        ("<tool_call>f", "<arg_key>"),
        ("<|tool_call_start|>[f(", ""),
    ],
)
def test_i9_hostile_text_is_searched_once_for_each_pattern(name, begins, ends, monkeypatch):
    monkeypatch.setattr(base, "CallFinder", CountingSource)
    monkeypatch.setattr(tagged_calls, "CallFinder", CountingSource)
    for unit in HOSTILE:
        CountingSource.searched = 0
        text = begins + unit * (4_000 // len(unit)) + ends
        assert parse(name, text).text == text
        assert CountingSource.searched <= 4 * len(text)


OWN = """
from slipstream.rollout_worker.chat.base import ParsedTurn

def as_pairs(text):
    return [("f", {"a": 1})] if "CALL" in text else []

def as_turn(text):
    return ParsedTurn(text, "said", [])

def broken(text):
    raise SystemExit("no")

def wrong(text):
    return [3]

number = 3
"""


def test_a_parser_of_ones_own_is_named_by_file_and_function(tmp_path, caplog):
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    pairs = load_own(f"{file}:as_pairs")
    assert pairs("CALL", NOTHING).calls == [ToolCall("f", {"a": 1})]
    assert pairs("408", NOTHING).message() == {"role": "assistant", "content": "408"}
    assert load_own(f"{file}:as_turn")("x", NOTHING).content == "said"
    for name in ("broken", "wrong"):  # I9: neither ends the worker
        parser = load_own(f"{file}:{name}")
        assert [type(call) for call in [*parser("x", NOTHING).calls, *parser("y", NOTHING).calls]] == [
            MalformedCall
        ] * 2
    assert caplog.text.count("failed on a turn") == 2  # once for each parser


@pytest.mark.parametrize("what", ["nowhere.py:f", "mine.py:nothing", "mine.py:number", "bad.py:f"])
def test_a_parser_of_ones_own_that_there_is_not_is_refused(tmp_path, what):
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "bad.py").write_text("1 / 0", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"chat.parser = .*(no Python file|defines no function|cannot be imported)"):
        load_own(f"{tmp_path}/{what}")


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*|$", "content": "text"},
    },
}


def test_the_tokenizers_own_response_template_is_used():
    tokenizer = build_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    parser = ResponseTemplate(tokenizer, [], "<|im_end|>")
    before = Before("<|im_start|>user\n2 by 3?<|im_end|>\n<|im_start|>assistant\n")
    turn = parser('<think>Hm.</think>I ask.<call>{"name": "f", "arguments": {"a": 1}}</call>', before)
    assert (turn.reasoning, turn.content, turn.calls) == ("Hm.", "I ask.", [ToolCall("f", {"a": 1})])
    assert parser("408", before).message() == {"role": "assistant", "content": "408"}
    (call,) = parser("<call>{</call>", before).calls
    assert isinstance(call, MalformedCall)
    assert parser("Hm. <call>{}", Before("<|im_start|>assistant\n<think>\n")).calls == []
