"""No message is accepted and rendered to nothing: it is shown, written in another form that is, or refused."""

import asyncio

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.format_check import check_tool_format
from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, build_tokenizer, save_model_folder
from tests.kit.renderer_cases import CASES as OF_RENDERERS
from tests.kit.template_cases import CASES as OF_TEMPLATES
from tests.kit.worker import END_OF_TURN, multiply

SCHEMAS = ToolBox([multiply]).schemas

# Shows a system message at the beginning, users and the assistant, the first call of a turn, and text or a call.
NARROW = """\
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and loop.first) %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant\\n<tool_call>\\n' }}
{{- m.tool_calls[0].function | tojson }}{{ '\\n</tool_call>' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>tool\\n' }}{% if m.content is string %}{{ m.content }}{% endif %}
{%- endif %}
{%- if m.role in ('user', 'system', 'assistant', 'tool') and (m.role != 'system' or loop.first) %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>tools\\n' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Shows two messages before the first user's, of either role.
TWO = (
    NARROW.replace("(m.role == 'system' and loop.first)", "(m.role in ('system', 'developer') and loop.index0 < 2)")
    .replace("(m.role != 'system' or loop.first)", "(m.role != 'system' or loop.index0 < 2)")
    .replace("('user', 'system', 'assistant', 'tool')", "('user', 'system', 'developer', 'assistant', 'tool')")
)

# Shows a system message after a turn too.
LATER = CHAT_TEMPLATE.replace(
    'message.role == "user"', 'message.role == "user" or (message.role == "system" and not loop.first)'
)

# Shows the last of all system messages, at the beginning.
LAST = (
    "{%- set ns = namespace(system='') %}{%- for m in messages if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endfor %}{{ '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' }}"
    + NARROW.replace(" or (m.role == 'system' and loop.first)", "")
)

# Takes text next to a call as reasoning, and leaves it out once a later turn has none.
FORGETS = CHAT_TEMPLATE.replace(
    "{%- for message in messages %}",
    "{%- set ns = namespace(last=0) %}{%- for m in messages if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 + 1 %}{% endfor %}{%- for message in messages %}",
    1,
).replace("message.content", "('' if message.tool_calls and ns.last else message.content)")

# Writes tags around a call that no notation knows.
WRAPPED = CHAT_TEMPLATE.replace(r"'\n<tool_call>\n'", r"""'\n<acts>\n<act kind="call">\n'""").replace(
    r"'\n</tool_call>'", r"'\n</act>\n</acts>'"
)

# Writes them once around all calls of a turn, as a list.
LISTED = CHAT_TEMPLATE.replace(r"'\n<tool_call>\n'", r"'\n<acts>[' if loop.first else ', '").replace(
    r"'\n</tool_call>'", r"(']</acts>' if loop.last else '')"
)
LISTED = LISTED.replace("{{- '\\n<acts>[' if loop.first else ', ' +", "{{- ('\\n<acts>[' if loop.first else ', ') +")

# Numbers calls and results through the conversation.
NUMBERED = "{%- set count = namespace(calls=0, results=0) %}" + CHAT_TEMPLATE.replace(
    r"(call.function | tojson) + '\n</tool_call>' }}",
    r"""'{"call_id": "' ~ count.calls ~ '", "name": "' ~ call.function.name ~ '", "arguments": ' ~ """
    r"""(call.function.arguments | tojson) ~ '}\n</tool_call>' }}{%- set count.calls = count.calls + 1 %}""",
).replace(
    r"""{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}""",
    r"""{{- '\n<tool_response call_id="' ~ count.results ~ '">\n' ~ message.content ~ '\n</tool_response>' }}"""
    r"""{%- set count.results = count.results + 1 %}""",
)

USER = {"role": "user", "content": "first question"}
SAID = {"role": "assistant", "content": "an answer"}


def call(place, **arguments):
    return {"type": "function", "id": f"abcdefgh{place}", "function": {"name": "multiply", "arguments": arguments}}


def turn(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(place, content):
    return {"role": "tool", "name": "multiply", "tool_call_id": f"abcdefgh{place}", "content": content}


def of(role, text="watch the units"):
    return {"role": role, "content": text}


# Conversations with the words that a prompt must hold.
CONVERSATIONS = {
    "developer": ([of("developer"), USER], ["watch the units"]),
    "two systems": ([of("system", "be brief"), of("system"), USER], ["be brief", "watch the units"]),
    "a later system": (
        [of("system", "be brief"), USER, SAID, of("system"), USER],
        ["be brief", "watch the units"],
    ),
    "two later systems": (
        [USER, SAID, of("system", "be brief"), USER, SAID, of("system"), USER],
        ["be brief", "watch the units"],
    ),
    "text next to an earlier call": (
        [USER, turn(call(1, a="six"), content="let me see"), result(1, "uno"), SAID, USER],
        ["let me see", "six", "uno"],
    ),
    "three openings": (
        [of("system", "be brief"), of("developer", "be kind"), of("system"), USER],
        ["be brief", "be kind", "watch the units"],
    ),
    **{
        f"{role} after {name}": ([*before, of(role)], ["watch the units"])
        for role in ("system", "developer", "function", "ipython", "environment", "model", "latest_reminder")
        for name, before in {
            "a user": [USER],
            "a turn": [USER, SAID],
            "a result": [USER, turn(call(1, a=2)), result(1, "6")],
        }.items()
    },
    "a call": ([USER, turn(call(1, a="seven")), result(1, "twelve")], ["seven", "twelve"]),
    "three calls": (
        [USER, turn(*(call(n, a=f"number {n}") for n in (1, 2, 3))), *(result(n, f"gave {n}") for n in (1, 2, 3))],
        [*(f"number {n}" for n in (1, 2, 3)), *(f"gave {n}" for n in (1, 2, 3))],
    ),
    "text next to two calls": (
        [USER, turn(call(1, a="six"), call(2, a="nine"), content="both now"), result(1, "uno"), result(2, "due")],
        ["both now", "six", "nine", "uno", "due"],
    ),
    "object": ([USER, turn(call(1, a=2)), result(1, {"rate": {"high": "41.5"}})], ["rate", "high", "41.5"]),
    "result of no call": ([USER, SAID, {"role": "tool", "content": "stray result"}], ["stray result"]),
}


def format_of(template, tools=SCHEMAS):
    return TemplateFormat(build_tokenizer(template), [END_OF_TURN], tools, "my-model")


def narrow(tools=SCHEMAS):
    return format_of(NARROW, tools)


def shown(chat, messages):
    return chat.tokenizer.decode(asyncio.run(chat.render_ids(messages, generation_prompt=True)))


def check_all_is_shown(chat):
    for name, (messages, words) in CONVERSATIONS.items():
        try:
            text = shown(chat, messages)
        except PromptError:
            continue
        assert [word for word in words if word not in text] == [], name


@pytest.mark.families("case")
@pytest.mark.parametrize("case", [*OF_TEMPLATES, *OF_RENDERERS], ids=lambda case: f"{case.how} {case.thinking}")
def test_no_format_leaves_out_a_message_that_it_takes(case):
    for tools in ([], SCHEMAS):
        try:
            chat = case.build(tools)
        except ConfigError:
            continue
        check_all_is_shown(chat)


@pytest.mark.parametrize("tools", [[], SCHEMAS], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "template", [NARROW, TWO, LATER, LAST, FORGETS], ids=["one", "two", "later", "last", "forgets"]
)
def test_a_template_that_knows_little_is_given_no_more(template, tools):
    check_all_is_shown(format_of(template, tools))


def test_messages_at_the_beginning_are_joined_to_one_system_message():
    text = shown(narrow([]), [of("developer", "be kind"), of("system", "be brief"), of("developer"), USER])
    assert text.startswith("<|im_start|>system\nbe kind\n\nbe brief\n\nwatch the units<|im_end|>\n<|im_start|>user\n")


def test_the_last_system_message_does_not_replace_the_first():
    with pytest.raises(PromptError, match=r"message 3 has the role 'system', .* shows nothing"):
        shown(format_of(LAST), CONVERSATIONS["a later system"][0])


def test_text_beside_a_call_that_a_later_turn_would_hide_is_a_turn_of_its_own():
    text = shown(format_of(FORGETS), CONVERSATIONS["text next to an earlier call"][0])
    assert "<|im_start|>assistant\nlet me see<|im_end|>" in text


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "missing"])
@pytest.mark.parametrize(
    "test", ["'</think>' in message.content", "message.content.split('x')", "message.content | length"]
)
def test_a_turn_that_only_calls_may_have_no_content(test, content):
    strict = CHAT_TEMPLATE.replace(
        "{%- for message in messages %}", f"{{%- for message in messages %}}{{%- if {test} %}}{{%- endif %}}", 1
    )
    messages = [USER, {"role": "assistant", **content, "tool_calls": [call(1, a="seven")]}, result(1, "twelve")]
    assert shown(format_of(strict), messages) == shown(format_of(CHAT_TEMPLATE), messages)


@pytest.mark.parametrize(
    "nameless", [{"id": "abcdefgh1"}, {"function": None}, {"function": {"name": None, "arguments": {}}}, {"name": ""}]
)
def test_a_call_without_a_name_is_refused(nameless):
    with pytest.raises(PromptError, match=r"a call of message 1 has no name: .*; give function.name"):
        shown(narrow(), [USER, turn(nameless), result(1, "6")])


def test_an_id_of_a_call_that_is_no_text_is_refused():
    with pytest.raises(PromptError, match=r"the tool_call_id of message 2 is \['abcdefgh1'\]; give the call's id"):
        shown(narrow(), [USER, turn(call(1, a=2)), {**result(1, "6"), "tool_call_id": ["abcdefgh1"]}])


def test_a_format_that_shows_no_user_is_refused():
    with pytest.raises(PromptError, match=r"message 0 has the role 'user', of which the chat format shows nothing"):
        shown(format_of(NARROW.replace("messages %}", "conversations or [] %}"), []), [USER])


def test_calls_of_one_turn_become_turns_with_their_own_results():
    messages, _ = CONVERSATIONS["text next to two calls"]
    words = ("both now", "six", "uno", "nine", "due")
    text = shown(narrow(), messages)
    places = [text.index(f'"a": "{word}"' if word in ("six", "nine") else word) for word in words]
    assert places == sorted(places)
    assert text.count("<|im_start|>assistant\n") == 4


def test_a_message_that_can_be_shown_in_no_form_is_refused_with_role_and_remedy():
    told = r"message 2 has the role 'system', .* shows nothing .* after one of role 'assistant': put its text into the"
    with pytest.raises(PromptError, match=told):
        shown(narrow(), [USER, SAID, of("system"), USER])
    with pytest.raises(PromptError, match=r"message 1 has the role 'ipython', .*: give it the role 'tool'"):
        shown(narrow(), [USER, of("ipython")])
    with pytest.raises(PromptError, match=r"has a function_call, .* give it as tool_calls"):
        shown(narrow(), [USER, {"role": "assistant", "content": None, "function_call": {"name": "f"}}, USER])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_is_appended_to_a_turn_holds_the_message_or_a_segment_opens(role):
    chat = format_of(LATER)
    suffix = asyncio.run(chat.suffix_ids([], [END_OF_TURN], [result(1, "6"), of(role), USER]))
    assert "watch the units" in chat.tokenizer.decode(suffix)
    assert asyncio.run(narrow().suffix_ids([], [END_OF_TURN], [result(1, "6"), of(role), USER])) is None
    appended = asyncio.run(narrow().suffix_ids([], [END_OF_TURN], [result(1, {"rate": 41.5})]))
    assert '{"rate": 41.5}' in chat.tokenizer.decode(appended)


def test_a_system_prompt_that_would_be_left_out_is_refused_at_the_start(tmp_path):
    folder = save_model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(NARROW.replace("(m.role == 'system' and loop.first)", "false"))
    run = config(WORKER, model={"path": str(folder)}, chat={"system_prompt": "be brief"})
    with pytest.raises(ConfigError, match=r"chat.system_prompt = 'be brief': .* shows no system message"):
        build_chat_format(run, [])
    (folder / "chat_template.jinja").write_text(NARROW)
    chat = build_chat_format(run, [])
    assert "be brief" in shown(chat, [USER])
    assert chat.changes()[:2] == ["a developer's message as the system's", "further system messages within the first"]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("template", [WRAPPED, LISTED], ids=["each call", "all calls"])
def test_tags_around_calls_that_no_notation_knows_are_no_content(template, count):
    """Nothing is left in the content, so that a new segment does not show the tags twice."""
    chat = format_of(template)
    proof = asyncio.run(check_tool_format(chat, SCHEMAS))
    assert proof.problems == []
    assert proof.fit_for_tools
    assert proof.parallel_calls
    for said in ("", "Let me see."):
        messages = [USER, turn(*(call(n, a=n) for n in range(count)), content=said)]
        prompt = shown(chat, [USER])
        text = chat.tokenizer.decode(asyncio.run(chat.render_ids(messages, False)))[len(prompt) :]
        read = chat.parse([], chat.tokenizer.encode(text.partition("<|im_end|>")[0], add_special_tokens=False))
        assert [each.arguments for each in read.calls] == [{"a": n} for n in range(count)]
        assert read.content == said


def test_a_parser_that_leaves_the_call_in_the_content_is_refused(tmp_path):
    file = tmp_path / "parsers.py"
    file.write_text(
        "import json\nfrom slipstream import ParsedTurn, ToolCall\n\ndef read(text):\n"
        "    call = json.loads(text[text.index('{') : text.rindex('}') + 1])\n"
        "    return ParsedTurn(text, text, [ToolCall(call['name'], call['arguments'])])\n"
    )
    chat = TemplateFormat(build_tokenizer(), [END_OF_TURN], SCHEMAS, "my-model", parser=f"{file}:read")
    proof = asyncio.run(check_tool_format(chat, SCHEMAS))
    assert not proof.fit_for_tools
    assert "which a prompt would show next to the call" in proof.problems[0]


def test_calls_that_a_template_numbers_through_the_conversation_are_compared_without_numbers():
    """In what is appended after the second turn its call has another number than in the whole conversation."""
    chat = format_of(NUMBERED)
    proof = asyncio.run(check_tool_format(chat, SCHEMAS))
    assert proof.problems == []
    assert proof.fit_for_tools
    total = format_of(NUMBERED.replace(r"'\n</tool_response>'", r"'\n</tool_response>' ~ count.calls"))
    assert not asyncio.run(check_tool_format(total, SCHEMAS)).several_rounds
