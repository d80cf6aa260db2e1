"""What no format renders: the same is refused of a template's conversations and of a renderer's."""

import asyncio

import pytest

from slipstream.rollout_worker.chat.base import PromptError, checked
from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, build_tokenizer
from tests.kit.renderer_cases import build
from tests.kit.worker import END_OF_TURN, chat_format, multiply

SCHEMAS = ToolBox([multiply]).schemas
USER = {"role": "user", "content": "Multiply 2 by 3."}
FORMATS = {"template": lambda: chat_format(SCHEMAS), "renderer": lambda: build("qwen3", {}, SCHEMAS)}


def user(*parts):
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (
            [USER, user({"type": "text", "text": "See"}, {"type": "image_url", "image_url": {}})],
            "message 1, of role 'user', holds a part of type 'image_url'; only text can be rendered",
        ),
        ([user({"type": "input_audio", "input_audio": {}})], "part of type 'input_audio'; only text"),
        ([user({"type": "novel", "text": "x"})], "part of type 'novel'; only text"),
        ([user({"text": "x"})], "part of type None; only text"),
        ([user("x")], "part of type 'str'; only text"),
        ([user({"type": "text", "text": None})], "part of type 'text' whose 'text' is None; give text"),
        ([{"role": "user", "content": None}], "message 0, of role 'user', has no content"),
        ([{"role": "system"}, USER], "message 0, of role 'system', has no content"),
        ([{"role": "user", "content": {"text": "x"}}], "the content of message 0 is {'text': 'x'}; give text"),
        ([{"role": "humen", "content": "x"}], "message 0 has the role 'humen'; give one of system"),
        ([{"role": None, "content": "x"}], "message 0 has the role None"),
        ([{"role": "tool", "content": "6"}, USER], "begins with a tool's message; put the assistant's call"),
        (
            [{"role": "system", "content": "Hi"}, {"role": "tool", "content": "6"}, USER],
            "begins with a tool's message",
        ),
    ],
)
def test_what_would_be_rendered_as_something_else_is_refused_by_both_formats(name, messages, told):
    chat = FORMATS[name]()
    for render in (chat.prompt_ids(messages), chat.render_ids(messages, True)):
        with pytest.raises(PromptError) as raised:
            asyncio.run(render)
        assert told in str(raised.value)


@pytest.mark.parametrize("role", ["developer", "ipython", "environment", "function", "model", "chatbot"])
def test_a_role_that_some_template_knows_is_possible(role):
    assert checked([USER, {"role": role, "content": "x"}])[1]["role"] == role


def test_a_role_that_the_runs_own_template_names_is_possible():
    template = CHAT_TEMPLATE + "{% for m in messages if m.role == 'critic' %}{{ m.content }}{% endfor %}"
    chat = TemplateFormat(build_tokenizer(template), [END_OF_TURN], [], "my-model")
    ids = asyncio.run(chat.prompt_ids([USER, {"role": "critic", "content": "Be strict."}]))
    assert "Be strict." in chat.tokenizer.decode(ids)


@pytest.mark.parametrize("name", FORMATS)
def test_a_data_sets_empty_fields_are_no_fields_in_both_formats(name):
    chat = FORMATS[name]()
    empty = {"name": None, "tool_calls": None, "reasoning_content": None}
    said = {"role": "assistant", "content": "It is 6."}
    full = [{**message, **empty} for message in (USER, said, USER)]
    assert asyncio.run(chat.prompt_ids(full)) == asyncio.run(chat.prompt_ids([USER, said, USER]))
