"""Which chat format the run file gets, and what it is told where its settings do not go together."""

import asyncio
import re

import pytest
from renderers.base import MODEL_RENDERER_MAP

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat import build as chat_package
from slipstream.rollout_worker.chat import renderer_settings
from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.format_check import ToolFormatCheck
from slipstream.rollout_worker.chat.renderer import RendererFormat
from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.renderer_cases import tokenizer_of
from tests.kit.worker import multiply

SCHEMAS = ToolBox([multiply]).schemas
USER = {"role": "user", "content": "Multiply 2 by 3."}


def run_file(path="./my-model", **chat):
    return config(WORKER, model={"path": str(path)}, chat=chat)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A folder of a fine-tune of Qwen3: nothing but its tokenizer says what it is."""
    folder = tmp_path_factory.mktemp("my-model")
    tokenizer_of("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def proved(monkeypatch):
    """Has the start check find what the test sets."""
    found = {"proof": ToolFormatCheck(True, True, True, True, True), "asked": 0}

    async def prove(chat, schemas):
        found["asked"] += 1
        assert schemas == SCHEMAS
        return found["proof"]

    monkeypatch.setattr(chat_package, "check_tool_format", prove)
    return found


@pytest.mark.parametrize(("model", "name"), sorted(MODEL_RENDERER_MAP.items()))
def test_a_model_that_the_library_knows_gets_its_renderer(model, name):
    assert renderer_settings.renderer_name(run_file(model)) == name
    assert renderer_settings.renderer_name(run_file(model, format="renderer")) == name
    assert renderer_settings.renderer_name(run_file(model, format="template")) is None
    assert renderer_settings.renderer_config(run_file(model).chat, name).name == name


def test_other_models_keep_their_template_unless_a_renderer_is_named():
    assert renderer_settings.renderer_name(run_file("Qwen/Qwen3-0.6B-my-own")) is None
    assert renderer_settings.renderer_name(run_file(renderer="qwen3")) == "qwen3"


def test_who_gives_a_template_or_a_parser_gets_a_template():
    assert renderer_settings.renderer_name(run_file("Qwen/Qwen3-0.6B", template="my.jinja")) is None
    assert renderer_settings.renderer_name(run_file("Qwen/Qwen3-0.6B", parser="hermes")) is None


@pytest.mark.parametrize(
    ("path", "chat", "told"),
    [
        ("./x", {"renderer": "qwen-3"}, "chat.renderer = 'qwen-3': there is none of that name.* qwen3, .*template"),
        ("./x", {"renderer": "default"}, 'there is none of that name.*chat.format = "template"'),
        ("./x", {"format": "renderer"}, "no renderer is known for model.path = ./x; set chat.renderer.*glm-5.1"),
        ("./x", {"renderer_options": {"a": 1}}, "none is known for model.path = ./x: set chat.renderer"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(path, chat, told):
    with pytest.raises(ConfigError, match=told):
        renderer_settings.renderer_name(run_file(path, **chat))


@pytest.mark.parametrize(
    ("chat", "told"),
    [
        (
            {"renderer_options": {"thinking": True}},
            "thinking = True.*fields of the renderer 'qwen3' are enable_thinking",
        ),
        ({"renderer_options": {"enable_thinking": "perhaps"}}, "enable_thinking = 'perhaps'.*boolean"),
        ({"chat_template_kwargs": {"enable_thinking": "perhaps"}}, "enable_thinking = 'perhaps'.*boolean"),
        ({"chat_template_kwargs": {"date": 1}}, "'date' is no variable.*enable_thinking.*chat.format = \"template\""),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "renderer_options": {"enable_thinking": False}},
            "both set 'enable_thinking'",
        ),
    ],
)
def test_options_that_a_renderer_does_not_have_are_refused_with_those_that_it_has(chat, told):
    with pytest.raises(ConfigError, match=told):
        renderer_settings.renderer_config(run_file(renderer="qwen3", **chat).chat, "qwen3")


def test_a_renderer_of_ones_own_is_named_by_its_import_path(tmp_path):
    options = {"import_path": f"{tmp_path}/mine.py:Mine"}
    with pytest.raises(ConfigError, match=r"'custom' cannot be made .*mine.py.* does not exist"):
        renderer_settings.renderer_config(run_file(renderer="custom", renderer_options=options).chat, "custom")
    with pytest.raises(ConfigError, match=r"import_path.*required"):
        renderer_settings.renderer_config(run_file(renderer="custom").chat, "custom")


@pytest.mark.parametrize("setting", ["renderer_options", "chat_template_kwargs"])
def test_d13_thinking_is_switched_in_the_run_file(qwen3, setting):
    on, off = (
        build_chat_format(run_file(qwen3, renderer="qwen3", **{setting: {"enable_thinking": value}}), [])
        for value in (True, False)
    )
    assert isinstance(on, RendererFormat)
    texts = [chat.tokenizer.decode(asyncio.run(chat.prompt_ids([USER]))) for chat in (on, off)]
    assert [text.endswith("<think>\n\n</think>\n\n") for text in texts] == [False, True]


def test_a_tokenizer_that_lacks_the_renderers_tokens_is_refused(plain):
    told = r"'qwen3' cannot be made with its tokenizer .*</think>.*chat.renderer, or set chat.format = \"template\""
    with pytest.raises(ConfigError, match=told):
        build_chat_format(run_file(plain, renderer="qwen3"), [])


def test_d13_with_tools_the_start_check_decides_and_without_it_is_not_asked(qwen3, proved):
    run = run_file(qwen3, renderer="qwen3")
    assert isinstance(build_chat_format(run, SCHEMAS), RendererFormat)
    assert proved["asked"] == 1
    proved["proof"] = ToolFormatCheck(True, True, False, problems=["the suffix is not exact; set chat.parser"])
    with pytest.raises(ConfigError, match=re.escape(str(qwen3)) + ".*the suffix is not exact; set chat.parser"):
        build_chat_format(run, SCHEMAS)
    build_chat_format(run, [])
    assert proved["asked"] == 2


async def test_the_start_check_runs_where_a_loop_runs_already(qwen3, proved):
    build_chat_format(run_file(qwen3, renderer="qwen3"), SCHEMAS)
    assert proved["asked"] == 1


@pytest.mark.parametrize("chat", [{"renderer": "qwen3"}, {"format": "template"}])
def test_a_system_prompt_stands_before_conversations_that_have_none_in_both_formats(qwen3, plain, chat):
    folder = qwen3 if "renderer" in chat else plain
    bare = build_chat_format(run_file(folder, **chat), [])
    told = build_chat_format(run_file(folder, system_prompt="Be brief.", **chat), [])
    system = {"role": "system", "content": "Be brief."}

    def ids(chat, prompt):
        return asyncio.run(chat.prompt_ids(prompt))

    assert ids(told, [USER]) == ids(bare, [system, USER]) != ids(bare, [USER])
    other = {"role": "system", "content": "Take your time."}
    assert ids(told, [other, USER]) == ids(bare, [other, USER])
    assert ids(told, "Once") == ids(bare, "Once")
    assert asyncio.run(told.render_ids([USER], True)) == ids(bare, [system, USER])
    assert [told.shown(prompt) for prompt in ([USER], [other, USER], "Once")] == [[system, USER], [other, USER], "Once"]
    assert [bare.shown(prompt) for prompt in ([USER], "Once")] == [[USER], "Once"]
    with pytest.raises(PromptError, match="is no message"):
        ids(told, ["Find it."])
    turn_ids = [*bare.tokenizer.encode("Yes.", add_special_tokens=False), bare.stop_token_ids[0]]
    answer = [{"role": "tool", "name": "multiply", "content": "6"}]
    before = ids(told, [USER])
    assert told.parse(before, turn_ids) == bare.parse(before, turn_ids)
    assert told.stop_token_ids == bare.stop_token_ids
    assert told.tokenizer.get_vocab() == bare.tokenizer.get_vocab()
    suffixes = [asyncio.run(chat.suffix_ids(before, turn_ids, answer)) for chat in (told, bare)]
    assert suffixes[0] == suffixes[1] is not None


def test_without_any_setting_a_template_is_used(plain):
    assert isinstance(build_chat_format(run_file(plain), SCHEMAS), TemplateFormat)
