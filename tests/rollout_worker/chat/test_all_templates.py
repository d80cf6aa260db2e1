"""Every chat template that TRL 1.16.0 ships, on tokenizers that stand in: fit for tools, or refused with the reason."""

import asyncio
import copy

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.format_check import check_tool_format
from slipstream.rollout_worker.chat.parsers.base import UNCLOSED_THOUGHT, MalformedCall, ToolCall
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit.template_cases import CASES, TEMPLATES, shipped
from tests.kit.worker import multiply

SCHEMAS = ToolBox([multiply]).schemas
pytestmark = pytest.mark.families("template", "case")
USER = {"role": "user", "content": "Multiply 2 by 3."}
FIT = [template for template in TEMPLATES if template.refused is None]
BY_STEM = {template.stem: template for template in TEMPLATES}
THOUGHT = "I should multiply."


def named(template):
    return template.stem


def proof_of(template, **settings):
    return asyncio.run(check_tool_format(template.format(SCHEMAS, **settings), SCHEMAS))


def test_all_that_trl_ships_are_here_and_the_25_that_work_there_work_here():
    assert [template.stem for template in sorted(TEMPLATES, key=named)] == shipped()
    assert len(shipped()) == 41
    in_trl = [template for template in TEMPLATES if template.in_trl]
    assert len(in_trl) == 25
    assert set(in_trl) <= set(FIT)


@pytest.mark.parametrize("template", FIT, ids=named)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
def test_a_template_that_is_fit_is_proven_to_be(template, variables):
    """Schemas shown, the rendered call read back, the suffix what the whole conversation has, over two rounds."""
    chat = template.format(SCHEMAS, variables=variables)
    proof = asyncio.run(check_tool_format(chat, SCHEMAS))
    assert proof.problems == []
    assert proof.fit_for_tools
    assert chat.parser_name == template.format(SCHEMAS).parser_name


@pytest.mark.parametrize("template", [template for template in TEMPLATES if template.refused], ids=named)
def test_a_template_that_is_not_fit_is_refused_with_the_reason_and_works_without_tools(template):
    try:
        reason = "; ".join(proof_of(template).problems)
    except ConfigError as error:
        reason = str(error)
    assert template.refused in reason
    assert "chat.template" in reason
    assert "a task without tools" in reason
    plain = template.format([])
    ids = asyncio.run(plain.prompt_ids([USER]))
    assert USER["content"] in plain.tokenizer.decode(ids)


@pytest.mark.parametrize("template", TEMPLATES, ids=named)
def test_without_tools_a_second_question_is_appended_as_the_template_has_it_or_a_segment_opens(template):
    """GPT-OSS ends an earlier answer with another token than the policy does: nothing can be appended there."""
    chat = template.format([])
    said = [USER, {"role": "assistant", "content": "It is 6."}, {"role": "user", "content": "And 3 by 4?"}]
    prompt = asyncio.run(chat.prompt_ids([USER]))
    whole = asyncio.run(chat.render_ids(said, generation_prompt=True))
    if whole[: len(prompt)] != prompt:  # an empty thought that is left out later
        return
    places = range(len(prompt), len(whole))
    stop = next((place for place in places if whole[place] in chat.stop_token_ids), None)
    turn = whole[len(prompt) :] if stop is None else whole[len(prompt) : stop + 1]
    suffix = asyncio.run(chat.suffix_ids(prompt, turn, said[2:]))
    assert suffix == (None if stop is None else whole[stop + 1 :])


@pytest.mark.parametrize("template", TEMPLATES, ids=named)
def test_content_in_parts_of_text_is_rendered_as_the_text_that_they_are(template):
    """With tools and without, in a prompt, in one that is continued, and in the history of a new segment."""

    def halved(message):
        text = message["content"]
        parts = [{"type": "text", "text": half, "image_url": None} for half in (text[:3], text[3:])]
        return {**message, "content": parts}

    said = {"role": "assistant", "content": "It is 6."}
    for tools in ([], SCHEMAS) if template.refused is None else ([],):
        chat = template.format(tools)
        for messages in ([USER], [USER, said], [USER, said, USER]):
            text, parts = (
                chat.tokenizer.decode(asyncio.run(chat.prompt_ids(each)))
                for each in (messages, [halved(message) for message in messages])
            )
            assert parts == text
            assert all(message["content"] in text for message in messages)


@pytest.mark.parametrize("template", FIT, ids=named)
def test_a_turn_that_was_cut_off_is_closed_as_context(template):
    chat = template.format(SCHEMAS)
    answer = [{"role": "tool", "name": "multiply", "content": "6"}]
    prompt = asyncio.run(chat.prompt_ids([USER]))
    cut = chat.tokenizer.encode("cut", add_special_tokens=False)
    closed = asyncio.run(chat.suffix_ids(prompt, cut, answer))
    assert closed[0] in chat.stop_token_ids
    assert asyncio.run(chat.suffix_ids(prompt, [*cut, closed[0]], answer)) == closed[1:]


@pytest.mark.parametrize("template", FIT, ids=named)
def test_d13_the_notation_is_told_from_the_template_and_not_from_its_text(template):
    """A fine-tune's template with a comment in it is as good as the original."""
    tokenizer = copy.deepcopy(template.format([]).tokenizer)
    tokenizer.chat_template = "{# mine #}" + tokenizer.chat_template
    original = template.format(SCHEMAS)
    edited = type(original)(tokenizer, original.stop_token_ids, SCHEMAS, "mine")
    assert edited.parser_name == original.parser_name
    assert asyncio.run(check_tool_format(edited, SCHEMAS)).fit_for_tools


@pytest.mark.parametrize("stem", ["qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano", "gemma4_v5"])
def test_reasoning_stays_within_a_tool_cycle_and_opens_a_segment_where_a_user_speaks(stem):
    chat = BY_STEM[stem].format(SCHEMAS, variables={"enable_thinking": True})
    call = {"type": "function", "id": "call00100", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
    answer = {"role": "tool", "name": "multiply", "tool_call_id": "call00100", "content": "6"}
    calling = {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": [call]}
    prompt = asyncio.run(chat.prompt_ids([USER]))
    whole = asyncio.run(chat.render_ids([USER, calling, answer], generation_prompt=True))
    assert whole[: len(prompt)] == prompt
    stop = next(place for place in range(len(prompt), len(whole)) if whole[place] in chat.stop_token_ids)
    turn = whole[len(prompt) : stop + 1]
    parsed = chat.parse(prompt, turn)
    assert (parsed.reasoning, parsed.content, [call.name for call in parsed.calls]) == (THOUGHT, "", ["multiply"])
    assert asyncio.run(chat.suffix_ids(prompt, turn, [answer])) == whole[stop + 1 :]
    assert asyncio.run(chat.suffix_ids(prompt, turn, [USER])) is None


def test_reasoning_that_a_template_drops_within_a_tool_cycle_opens_a_segment():
    """Gemma 4's first template leaves the thoughts out of turns with calls."""
    chat = BY_STEM["gemma4_v2"].format(SCHEMAS, variables={"enable_thinking": True})
    answer = [{"role": "tool", "name": "multiply", "content": "6"}]
    prompt = asyncio.run(chat.prompt_ids([USER]))
    call = "<|tool_call>call:multiply{a:2,b:3}<tool_call|><turn|>"
    bare, thinking = (
        chat.tokenizer.encode(text, add_special_tokens=False)
        for text in (call, f"<|channel>thought\n{THOUGHT}<channel|>{call}")
    )
    assert chat.parse(prompt, thinking).reasoning == THOUGHT
    assert asyncio.run(chat.suffix_ids(prompt, bare, answer)) is not None
    assert asyncio.run(chat.suffix_ids(prompt, thinking, answer)) is None


@pytest.mark.parametrize("template", FIT, ids=named)
def test_i9_a_call_inside_a_thought_that_is_never_closed_is_not_a_call(template):
    """Whether the policy opened the thought or the prompt did. Where tags tell the thought, it is a failed attempt."""
    chat = template.format(SCHEMAS, variables={"enable_thinking": True})
    prompt = asyncio.run(chat.prompt_ids([USER]))
    written = written_call(chat)
    assert written
    openings = {"harmony": "<|channel|>analysis<|message|>", "atem": " to=self<|message|>"}
    opening = openings.get(chat.parser_name, chat.reasoning.thought.opening)
    opened = chat.tokenizer.decode(prompt).rstrip().endswith(opening)
    for text in [f"{opening}\nI could write {written}", *([f"I could write {written}"] if opened else [])]:
        turn = chat.parse(prompt, chat.tokenizer.encode(text, add_special_tokens=False))
        assert turn.calls == ([] if chat.parser_name in openings else [UNCLOSED_THOUGHT])
        assert turn.text == text


def written_call(chat):
    """A call as the template writes it, without what stands before it."""
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
    answer = {"role": "tool", "name": "multiply", "content": "6"}
    whole = asyncio.run(
        chat.render_ids([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer], True)
    )
    text = chat.tokenizer.decode(whole).partition(USER["content"])[2]
    if chat.parser_name in ("harmony", "atem"):  # a call is its own message
        return text.partition("to=")[2].partition("<|message|>")[2].partition("<|eot|>")[0].partition("<|call|>")[0]
    openings = {
        "hermes": "<tool_call>",
        "qwen3_xml": "<tool_call>",
        "glm4": "<tool_call>",
        "gemma4": "<|tool_call>",
        "lfm2_pythonic": "<|tool_call_start|>",
        "llama3_json": '{"name"',
    }
    opening = openings[chat.parser_name]
    _, found, rest = text.partition(opening)
    end = min(place for stop in chat.stop_token_ids if (place := rest.find(chat.tokenizer.decode([stop]))) >= 0)
    return found + rest[:end]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.how} {case.thinking}")
def test_any_ids_can_be_parsed(case):
    try:
        chat = case.build(SCHEMAS)
    except ConfigError:
        return
    size = len(chat.tokenizer)
    special = [chat.tokenizer.convert_tokens_to_ids(token) for token in chat.tokenizer.get_added_vocab()]
    for seed in range(30):
        ids = [special[n * 7 % len(special)] if n % 3 else (seed * 31 + n * n) % size for n in range(seed, seed + 25)]
        turn = chat.parse(ids[:5], ids)
        assert turn.message()["role"] == "assistant"
        assert all(isinstance(call, ToolCall | MalformedCall) for call in turn.calls)
