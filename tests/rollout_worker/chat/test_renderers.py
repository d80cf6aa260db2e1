"""Every configuration of the `renderers` library as a chat format, over tokenizers that stand in for the families'.

What the library cannot do stands in the tables below: a newer one that can makes a test fail here.
"""

import asyncio
import re
from functools import cache
from typing import get_args

import pytest
import renderers
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.chat.parsers.base import MalformedCall, ToolCall
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit.renderer_cases import CASES, SPECIAL_TOKENS, build

pytestmark = pytest.mark.families("case")


def search(query: str, count: int, filters: dict) -> str:
    """Search the library.

    Args:
        query: What to look for.
        count: How many to find.
        filters: What to leave out.
    """
    return f"{count} of {query}"


SCHEMAS = ToolBox([search]).schemas
ARGUMENTS = {"query": 'say "hi"\nto Zoë', "count": 7, "filters": {"authors": [1, {"name": None}]}}
USER = {"role": "user", "content": "Find it."}

# DeepSeek's first two templates show no tools.
WITHOUT_SCHEMAS = {"deepseek-v3", "deepseek-r1"}
# Renders no turn as its prompt asks for it: the prompt opens the reasoning, and the template leaves it out.
NEVER_EXACT = {"deepseek-r1"}
# One call a turn: Llama 3's template takes no more, and harmony ends a turn at the first.
ONE_CALL = {"llama-3", "gpt-oss"}
# The library's own order of several answers needs the calls, which it does not get.
SEVERAL_ANSWERS_REFUSED = {"deepseek-v4"}
# A turn continues after the answer: what is said next to a call is rendered there, and one that was cut off before the
# call was handed over cannot be answered.
ANSWERED_INSIDE = {"gemma4"}
# Its parser leaves out what is said after a call.
NOTHING_AFTER_A_CALL = {"deepseek-v4"}
THINKS_IN_CHANNELS = {"gemma4", "gpt-oss", "inkling"}
REASONS = ("on", "always")

FORMATS = {f"{case.how.removeprefix('renderer ')}, thinking {case.thinking}": case for case in CASES}


EXACT = [key for key, case in FORMATS.items() if case.how.removeprefix("renderer ") not in NEVER_EXACT]
THINKING = [key for key in FORMATS if key.endswith(("thinking on", "thinking always"))]
THINKING_IN_TAGS = [key for key in THINKING if key in EXACT and key.partition(",")[0] not in THINKS_IN_CHANNELS]
SPEAKING_BESIDE_CALLS = [key for key in EXACT if key.partition(",")[0] not in ANSWERED_INSIDE | ONE_CALL]


def over(keys):
    return pytest.mark.parametrize("case", keys, indirect=True)


@pytest.fixture(params=FORMATS)
def case(request):
    return FORMATS[request.param]


@cache
def built(case):
    return case.build(SCHEMAS)


@pytest.fixture
def chat(case):
    return built(case)


@pytest.fixture
def name(case):
    return case.how.removeprefix("renderer ")


def text_of(chat, ids):
    return chat.tokenizer.decode(ids, skip_special_tokens=False)


def ids_of(chat, text):
    return chat.tokenizer.encode(text, add_special_tokens=False)


def calling(case, calls=1, first=0, said=""):
    """A turn of the policy, and the answers to it."""
    ids = [f"functions.search:{number}" for number in range(first, first + calls)]
    turn = {
        "role": "assistant",
        "content": said,
        "tool_calls": [
            {"type": "function", "id": call_id, "function": {"name": "search", "arguments": ARGUMENTS}}
            for call_id in ids
        ],
    }
    if case.thinking in REASONS:
        turn["reasoning_content"] = "It is in there."
    answer = {"role": "tool", "name": "search"}
    answers = [{**answer, "content": f"7 of {call_id}", "tool_call_id": call_id} for call_id in ids]
    return turn, answers


def prompt_of(chat, *messages):
    return asyncio.run(chat.prompt_ids([USER, *messages]))


def sampled(chat, before, whole):
    """The turn that a rendering holds after `before`, up to the id that ends it, as a policy may sample it."""
    written = text_of(chat, whole)
    assert written.startswith(text_of(chat, before))
    ids = ids_of(chat, written.removeprefix(text_of(chat, before)))
    end = next((place + 1 for place, token in enumerate(ids) if token in chat.stop_token_ids), len(ids))
    return ids[:end]


def suffix_of(chat, prompt_ids, turn_ids, messages):
    before = [*prompt_ids], [*turn_ids]
    suffix = asyncio.run(chat.suffix_ids(prompt_ids, turn_ids, messages))
    assert (prompt_ids, turn_ids) == before
    return suffix


def test_each_configuration_of_the_library_has_a_case():
    classes = get_args(get_args(renderers.RendererConfig)[0])
    names = {kind.model_fields["name"].default for kind in classes}
    assert set(SPECIAL_TOKENS) == names - {"auto", "default", "custom"}


def test_d2_the_schemas_are_shown(chat, name):
    prompt = text_of(chat, prompt_of(chat))
    shown = all(part in prompt for part in ("Search the library.", "count", "How many to find.", "filters"))
    assert shown == (name not in WITHOUT_SCHEMAS)


@over(EXACT)
def test_a_rendered_call_is_read_back_and_what_follows_is_the_whole_rendering_through_three_rounds(case, chat, name):
    ids, messages = prompt_of(chat), []
    for number in range(3):
        turn, answers = calling(case, first=number)
        messages += [turn, *answers]
        whole = prompt_of(chat, *messages)
        turn_ids = sampled(chat, ids, whole)
        parsed = chat.parse(ids, turn_ids)
        assert [(call.name, call.arguments) for call in parsed.calls] == [("search", ARGUMENTS)]
        assert (parsed.content, parsed.reasoning) == ("", turn.get("reasoning_content"))
        ids = ids + turn_ids + suffix_of(chat, ids, turn_ids, answers)
        assert text_of(chat, ids) == text_of(chat, whole)
        assert ids == whole


@over(EXACT)
def test_two_calls_in_one_turn_and_two_answers(case, chat, name):
    turn, answers = calling(case, calls=2)
    ids = prompt_of(chat)
    try:
        whole = prompt_of(chat, turn, *answers)
    except PromptError:
        assert name in ONE_CALL
        return
    turn_ids = sampled(chat, ids, whole)
    calls = chat.parse(ids, turn_ids).calls
    if name in ONE_CALL:
        assert len(calls) == 1
        return
    assert [(call.name, call.arguments) for call in calls] == [("search", ARGUMENTS)] * 2
    suffix = suffix_of(chat, ids, turn_ids, answers)
    assert (suffix is None) == (name in SEVERAL_ANSWERS_REFUSED)
    assert suffix is None or ids + turn_ids + suffix == whole


@over(SPEAKING_BESIDE_CALLS)
def test_the_content_is_told_from_reasoning_and_calls(case, chat, name):
    turn, answers = calling(case, said="I will look.")
    ids = prompt_of(chat)
    turn_ids = sampled(chat, ids, prompt_of(chat, turn, *answers))
    parsed = chat.parse(ids, turn_ids)
    assert (parsed.content, parsed.reasoning) == ("I will look.", turn.get("reasoning_content"))
    assert len(parsed.calls) == 1
    assert parsed.text == text_of(chat, turn_ids[:-1] if turn_ids[-1] in chat.stop_token_ids else turn_ids)


def test_a_call_that_was_cut_off_before_its_end_is_closed_and_keeps_its_ids(case, chat, name):
    """So ends a turn at a stop text of the run file's, which comes after the call."""
    ids, (turn, answers) = prompt_of(chat), calling(case)
    if name in NEVER_EXACT:
        turn_ids = ids_of(chat, "The product is")
    else:
        turn_ids = sampled(chat, ids, prompt_of(chat, turn, *answers))
        turn_ids = [token for token in turn_ids if token not in chat.stop_token_ids]
    suffix = suffix_of(chat, ids, turn_ids, answers)
    assert (suffix is None) == (name in NEVER_EXACT | ANSWERED_INSIDE)
    assert suffix is None or "7 of functions.search:0" in text_of(chat, suffix)


@over(THINKING)
def test_a_stop_inside_the_reasoning_is_refused(case, chat, name):
    """Nothing can be appended that the model would read as the end of its thoughts."""
    ids = prompt_of(chat)
    opened = text_of(chat, ids[-12:])
    thought = "It may be" if "think" in opened or "analysis" in opened else _opening(name) + "It may be"
    turn_ids = [*ids_of(chat, thought), chat.stop_token_ids[0]]
    parsed = chat.parse(ids, turn_ids)
    assert (parsed.content, parsed.calls) == ("", [])
    assert "It may be" in (parsed.reasoning or "")


def _opening(name):
    return {
        "gemma4": "<|channel>thought\n",
        "inkling": "<|content_thinking|>",
        "hy3": "<think:opensource>",
    }.get(name, "<think>")


def test_a_refused_bridge_gives_none_and_not_a_guess(chat):
    ids = prompt_of(chat)
    turn_ids = [*ids_of(chat, "So."), chat.stop_token_ids[0]]
    assert suffix_of(chat, ids, turn_ids, [{"role": "assistant", "content": "I continue."}]) is None
    assert suffix_of(chat, ids, turn_ids, []) is None


SAID = "The answer, in one word, is"


def test_a_prompt_that_ends_in_the_policys_words_is_continued_or_refused_with_the_reason(case, chat, name):
    begun = {"role": "assistant", "content": SAID}
    if name.startswith("glm") and case.thinking in REASONS:
        with pytest.raises(PromptError, match="would read on as reasoning"):
            prompt_of(chat, begun)
        return
    ids = prompt_of(chat, begun)
    written, before = text_of(chat, ids), text_of(chat, prompt_of(chat))
    assert written.endswith(SAID)
    assert written.count("Find it.") == before.count("Find it.") == 1
    parsed = chat.parse(ids, [*ids_of(chat, " Zoë."), chat.stop_token_ids[0]])
    assert (parsed.content.strip(), parsed.calls) == ("Zoë.", [])
    with pytest.raises(PromptError, match="tool calls, which cannot be continued"):
        prompt_of(chat, calling(FORMATS["qwen3, thinking off"])[0])


def test_an_empty_last_turn_is_begun(chat):
    assert prompt_of(chat, {"role": "assistant", "content": ""}) == prompt_of(chat)


@over(EXACT)
def test_without_tools_nothing_is_a_call_and_its_text_stays(case, chat, name):
    ids, (turn, answers) = prompt_of(chat), calling(case)
    turn_ids = sampled(chat, ids, prompt_of(chat, turn, *answers))
    parsed = case.build([]).parse(ids, turn_ids)
    assert parsed.calls == []
    assert "Zoë" in parsed.content


def test_a_picture_is_refused(chat):
    with pytest.raises(PromptError, match="'image_url'; only text"):
        prompt_of(chat, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}]})


@over([key for key in FORMATS if not key.startswith("prime-qwen3")])  # takes strings alone, and says so
def test_a_text_part_is_text(chat):
    ids = asyncio.run(chat.prompt_ids([{"role": "user", "content": [{"type": "text", "text": "Find it."}]}]))
    assert text_of(chat, ids) == text_of(chat, prompt_of(chat))


def test_a_data_sets_empty_fields_are_none(chat):
    empty = {"name": None, "tool_calls": None, "reasoning_content": None, "tool_call_id": None}
    assert asyncio.run(chat.prompt_ids([{**USER, **empty}])) == prompt_of(chat)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "No messages"),
        ([{"role": "user", "content": "\ud800"}], "Error"),
        ([{"content": "x"}], "role"),
        (["Find it."], "'Find it.' is no message"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_says_so(messages, told):
    with pytest.raises(PromptError, match=told):
        asyncio.run(FORMATS["qwen3, thinking on"].build(SCHEMAS).prompt_ids(messages))


def test_a_text_prompt_is_taken_as_it_is(chat):
    assert text_of(chat, asyncio.run(chat.prompt_ids("Once upon a time"))).endswith("Once upon a time")


async def test_long_texts_are_rendered_in_a_thread_and_short_ones_at_once(monkeypatch):
    chat = build("qwen3", {}, SCHEMAS)
    in_thread, threads = asyncio.to_thread, []

    async def counted(work, **arguments):
        threads.append(work)
        return await in_thread(work, **arguments)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    ids = await chat.prompt_ids([USER])
    turn_ids = [*ids_of(chat, "Well."), chat.stop_token_ids[0]]
    assert await chat.suffix_ids(ids, turn_ids, [{"role": "tool", "content": "short"}])
    assert not threads
    long = "Once upon a time. " * 1000
    assert await chat.suffix_ids(ids, turn_ids, [{"role": "tool", "content": long}])
    assert await chat.prompt_ids([{"role": "user", "content": long}])
    assert await chat.prompt_ids(long)
    assert await chat.render_ids([{"role": "user", "content": long}], False)
    assert len(threads) == 4


# What a policy may write in place of a call: renderer, turn, and what becomes of it.
WRONG = [
    ("qwen3", "<tool_call>\nsearch(7)\n</tool_call>", r"not valid JSON: search\(7\)"),
    ("qwen3", '<tool_call>\n{"name": "search"', "not closed"),
    ("qwen3", '<tool_call>{"arguments": {}}</tool_call>', "names no function"),
    ("qwen3", '<tool_call>{"name": ["search"], "arguments": {}}</tool_call>', "names no function"),
    ("qwen3", f'<tool_call>{{"name": "search", "arguments": {{"count": {"9" * 5000}}}}}</tool_call>', "ValueError"),
    ("qwen3", f"<tool_call>{'[' * 100_000}</tool_call>", "RecursionError|not valid JSON"),
    ("glm-5", "</think><tool_call>search<arg_key>query</arg_key>", "not closed"),
    ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>search", "tool call"),
    ("minimax-m2", "</think><minimax:tool_call>search</minimax:tool_call>", "tool call"),
]


@pytest.mark.parametrize(("name", "written", "reason"), WRONG)
def test_an_attempt_that_cannot_be_read_is_told_from_no_call_and_stays_in_the_content(name, written, reason):
    chat = build(name, {}, SCHEMAS)
    ids = prompt_of(chat)
    parsed = chat.parse(ids, [*ids_of(chat, written), chat.stop_token_ids[0]])
    (call,) = parsed.calls
    assert isinstance(call, MalformedCall)
    assert re.search(reason, call.reason)
    assert len(call.reason) < 200
    assert parsed.content
    assert parsed.content[:1000] in written
    assert "tool_calls" not in parsed.message()


def test_arguments_that_are_no_object_go_on_as_text():
    chat = build("gpt-oss", {}, SCHEMAS)
    ids = prompt_of(chat)
    turn = "It is.<|end|><|start|>assistant to=functions.search<|channel|>commentary json<|message|>query: Zoë<|call|>"
    parsed = chat.parse(ids, ids_of(chat, turn))
    assert parsed.calls == [ToolCall("search", "query: Zoë")]
    assert parsed.reasoning == "It is."
    qwen = build("qwen3", {}, SCHEMAS)
    written = '<tool_call>{"name": "search", "arguments": [7, "Zoë"]}</tool_call>'
    assert qwen.parse([], ids_of(qwen, written)).calls == [ToolCall("search", '[7, "Zoë"]')]


def test_a_tool_that_does_not_exist_is_a_call_which_the_tools_answer():
    chat = build("glm-5", {"enable_thinking": False}, SCHEMAS)
    turn = ids_of(chat, "<tool_call>fetch<arg_key>query</arg_key><arg_value>Zoë</arg_value></tool_call>")
    assert chat.parse(prompt_of(chat), turn).calls == [ToolCall("fetch", {"query": "Zoë"})]


def test_a_tag_that_is_only_spelled_is_no_call():
    chat = build("qwen3", {}, SCHEMAS)
    tag = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    spelled = [token for letter in tag for token in ids_of(chat, letter)]
    assert chat.parse(prompt_of(chat), spelled).calls == []


def in_thought(case, chat, name, said_after):
    """A turn with a call inside its reasoning, which continues as `said_after`."""
    ids, (turn, answers) = prompt_of(chat), calling(case)
    turn_ids = sampled(chat, ids, prompt_of(chat, turn, *answers))
    written = text_of(chat, [token for token in turn_ids if token not in chat.stop_token_ids])
    close = "</think:opensource>" if name == "hy3" else "</think>"
    thought, _, call = written.partition(close)
    return ids, [*ids_of(chat, f"{thought}{call}{said_after.format(close=close)}"), chat.stop_token_ids[0]]


@over(THINKING_IN_TAGS)
def test_i9_a_call_that_the_policy_only_thinks_of_is_no_call(case, chat, name):
    parsed = chat.parse(*in_thought(case, chat, name, "{close}\nI will not."))
    assert parsed.calls == []
    assert "I will not." in parsed.text
    assert "I will not." in parsed.content or name in NOTHING_AFTER_A_CALL


@over(THINKING_IN_TAGS)
def test_i9_a_call_inside_reasoning_that_is_never_closed_is_not_run_and_the_policy_is_told(case, chat, name):
    parsed = chat.parse(*in_thought(case, chat, name, ""))
    assert all(isinstance(call, MalformedCall) for call in parsed.calls)
    assert "It is in there." in parsed.reasoning
    assert parsed.content == ""


@settings(max_examples=150)
@given(data=st.data())
def test_i9_any_ids_can_be_parsed_and_bridged(built_ones, data):
    chat, prompt_ids = data.draw(st.sampled_from(built_ones))
    size = len(chat.tokenizer)
    special = st.integers(size - len(chat.tokenizer.added_tokens_decoder), size - 1)
    texts = [
        '{"name": "search", "arguments": {',
        '"count": 99999999999999999999}}',
        "search",
        "[[[[",
        "\n",
        "functions.",
    ]
    piece = st.sampled_from(texts).map(lambda text: ids_of(chat, text))
    token = st.one_of(special, st.integers(0, size - 1)).map(lambda token: [token])
    pieces = data.draw(st.lists(st.one_of(token, token, piece), max_size=40))
    turn_ids = [token for tokens in pieces for token in tokens]
    parsed = chat.parse(prompt_ids, turn_ids)
    assert parsed.message()["role"] == "assistant"
    assert chat.parse([], turn_ids).message()["role"] == "assistant"
    for call in parsed.calls:
        assert isinstance(call, MalformedCall) or (call.name and isinstance(call.arguments, dict | str))
    suffix = suffix_of(chat, prompt_ids, turn_ids, [{"role": "tool", "name": "search", "content": "7"}])
    assert suffix is None or suffix


@pytest.fixture(scope="module")
def built_ones():
    chats = [built(case) for case in CASES]
    return [(chat, prompt_of(chat)) for chat in chats]
