"""What every chat format keeps, on the tiny model. A new one is one line in `MALFORMED`."""

import asyncio
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.config import ChatSection
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.parsers.base import MalformedCall, ToolCall
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.worker import END_OF_TURN, TOKENIZER, multiply

# Turns by format in which a call is attempted and cannot be read.
MALFORMED = {
    "template": ["<tool_call>multiply(2, 3)</tool_call>", '<tool_call>{"name": "multiply", "arguments": {"a": 2'],
}

SCHEMAS = ToolBox([multiply]).schemas
USER = {"role": "user", "content": "Multiply 2 by 3."}
CALL = ToolCall("multiply", {"a": 2, "b": 3})
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": CALL.name, "arguments": CALL.arguments}}],
}


def answer(content):
    return {"role": "tool", "name": "multiply", "content": content}


def whole(*messages, tools=SCHEMAS):
    """The template's own rendering of a conversation, as text, up to where the policy is asked to speak."""
    return TOKENIZER.apply_chat_template([USER, *messages], tools=tools, tokenize=False, add_generation_prompt=True)


def text_of(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def after_prompt(*messages):
    """The ids of a rendered turn, from the prompt to the token that ends it."""
    turn = whole(*messages).removeprefix(whole())
    return ids_of(turn[: turn.index(TOKENIZER.eos_token) + len(TOKENIZER.eos_token)])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=MALFORMED)
def built(request, model_folder):
    """A format's name, and the format with and without tools."""
    run_config = config(WORKER, model={"path": str(model_folder)}, chat={"format": request.param})
    return request.param, build_chat_format(run_config, SCHEMAS), build_chat_format(run_config, [])


def test_the_formats_are_those_of_the_run_file_and_all_are_tested():
    in_the_schema = get_args(ChatSection.model_fields["format"].annotation)
    assert set(in_the_schema) == {"auto", "renderer", *MALFORMED}, "renderers: see test_renderers.py"


def test_the_turn_ends_at_a_stop_id(built):
    _, chat, _ = built
    assert END_OF_TURN in chat.stop_token_ids
    assert after_prompt(CALLING)[-1] in chat.stop_token_ids


def test_a_prompt_is_the_templates_whole_rendering(built):
    _, chat, plain = built
    assert text_of(asyncio.run(chat.prompt_ids([USER]))) == whole()
    assert text_of(asyncio.run(plain.prompt_ids([USER]))) == whole(tools=None)


@given(said=st.text(max_size=30), answers=st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_prompt_turn_and_suffix_are_the_templates_whole_rendering(built, said, answers):
    """The turn is as it was sampled, and no id of it changes."""
    _, chat, _ = built
    messages = [answer(content) for content in answers]
    prompt_ids, turn_ids = asyncio.run(chat.prompt_ids([USER])), [*ids_of(said), END_OF_TURN]
    before = [*prompt_ids, *turn_ids]
    suffix = asyncio.run(chat.suffix_ids(prompt_ids, turn_ids, messages))
    assert [*prompt_ids, *turn_ids] == before
    assert text_of(before + suffix) == whole({"role": "assistant", "content": said}, *messages)


def test_a_second_suffix_continues_the_first(built):
    _, chat, _ = built
    ids = asyncio.run(chat.prompt_ids([USER]))
    messages = []
    for content in ("6", "7"):
        turn_ids = after_prompt(CALLING)
        suffix = asyncio.run(chat.suffix_ids(ids, turn_ids, [answer(content)]))
        ids = ids + turn_ids + suffix
        messages += [CALLING, answer(content)]
    assert text_of(ids) == whole(*messages)


def test_a_rendered_call_parses_back(built):
    _, chat, _ = built
    prompt_ids = asyncio.run(chat.prompt_ids([USER]))
    for said in ("", "I will ask."):
        turn = chat.parse(prompt_ids, after_prompt({**CALLING, "content": said}))
        assert turn.calls == [CALL]
        assert turn.content == said
        assert turn.message() == {**CALLING, "content": said}


def test_a_malformed_call_is_told_from_no_call(built):
    name, chat, _ = built
    for text in MALFORMED[name]:
        (call,) = chat.parse([], ids_of(text)).calls
        assert isinstance(call, MalformedCall)
        assert call.reason
    turn = chat.parse([], [*ids_of("The product is 6."), END_OF_TURN])
    assert (turn.text, turn.content, turn.calls) == ("The product is 6.", "The product is 6.", [])
    assert turn.message() == {"role": "assistant", "content": "The product is 6."}


def test_without_tools_nothing_is_a_call(built):
    name, _, plain = built
    for text in [*MALFORMED[name], text_of(after_prompt(CALLING)[:-1])]:
        turn = plain.parse([], ids_of(text))
        assert (turn.text, turn.calls) == (text, [])


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_any_ids_can_be_parsed(built, ids):
    _, chat, plain = built
    for chat_format in (chat, plain):
        assert chat_format.parse([], ids).message()["role"] == "assistant"
