"""`chat.tools = "prompt"`: templates that know no tools get them as plain messages."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.format_check import check_answer_format, check_tool_format
from slipstream.rollout_worker.chat.parsers.base import ToolCall
from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit import WORKER, config
from tests.kit.agent import MULTIPLY, agent_task, client_of, results_of
from tests.kit.agent import USER as AGENT_USER
from tests.kit.fake_vllm.policies import multiplying, scripted
from tests.kit.fake_vllm.tokenizer import build_tokenizer, save_model_folder
from tests.kit.template_cases import TEMPLATES
from tests.kit.worker import END_OF_TURN, TOKENIZER, fake, multiply, roll, task

SCHEMAS = ToolBox([multiply]).schemas
USER = {"role": "user", "content": "Multiply 2 by 3."}
DEFAULT = "You are a helpful assistant named Slip."
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\n"
    + DEFAULT
    + "<|im_end|>\\n' }}{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
SYSTEM_LEFT_OUT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q: ' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ 'A: ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
WAYS = {"default system": CHATML, "no system": NO_SYSTEM, "system left out": SYSTEM_LEFT_OUT}

# Their prompt opens a thought, and they leave it out of the conversation later. So nothing can be appended to a turn.
OPEN_A_THOUGHT = ("deepseek_r1_distill", "deepseekv3")


def prompt_format(template):
    return TemplateFormat(build_tokenizer(template), [END_OF_TURN], SCHEMAS, "my-model", in_prompt=True)


def text_of(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def rendered(chat, *messages):
    return text_of(asyncio.run(chat.render_ids(list(messages), generation_prompt=True)))


@pytest.mark.parametrize("way", WAYS)
def test_a_template_without_tools_passes_the_start_check(way):
    chat = prompt_format(WAYS[way])
    proof = asyncio.run(check_tool_format(chat, SCHEMAS))
    assert (proof.fit_for_tools, proof.parallel_calls, proof.problems) == (True, True, [])
    assert asyncio.run(check_answer_format(chat)).appended
    assert chat.parser_name == "hermes"


@pytest.mark.parametrize("template", [each for each in TEMPLATES if each.refused], ids=lambda each: each.stem)
def test_each_template_of_trl_that_refuses_tools_takes_them_in_the_prompt(template):
    proof = asyncio.run(check_tool_format(template.format(SCHEMAS, in_prompt=True), SCHEMAS))
    assert proof.fit_for_tools == (template.stem not in OPEN_A_THOUGHT)


def test_the_tools_follow_the_templates_default_system_message_or_the_runs():
    chat = prompt_format(CHATML)
    default, own = rendered(chat, USER), rendered(chat, {"role": "system", "content": "Be brief."}, USER)
    assert default.startswith(f"<|im_start|>system\n{DEFAULT}\n\n# Tools\n")
    assert own == default.replace(DEFAULT, "Be brief.")
    assert json.dumps(SCHEMAS[0], ensure_ascii=False) in default


def test_without_a_system_message_the_tools_begin_the_first_users_message():
    chat = prompt_format(NO_SYSTEM)
    assert rendered(chat, USER).startswith("[INST] # Tools\n")
    assert rendered(chat, {"role": "system", "content": "Be brief."}, USER).startswith("[INST] Be brief.\n\n# Tools\n")
    assert rendered(chat, USER).endswith("</tool_call>\n\nMultiply 2 by 3. [/INST]")


@given(said=st.text(max_size=30), results=st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_a_result_is_appended_to_the_ids_that_were_sampled(said, results):
    chat = prompt_format(CHATML)
    prompt = asyncio.run(chat.prompt_ids([USER]))
    turn = [*TOKENIZER.encode(said, add_special_tokens=False), END_OF_TURN]
    messages = [{"role": "tool", "name": "multiply", "content": result} for result in results]
    suffix = asyncio.run(chat.suffix_ids(prompt, turn, messages))
    shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    assert text_of(suffix) == f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    assert text_of([*prompt, *turn, *suffix]) == rendered(chat, USER, {"role": "assistant", "content": said}, *messages)


def test_a_turns_calls_are_written_as_they_are_read():
    chat = prompt_format(CHATML)
    turn = [*TOKENIZER.encode('So: <tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>')]
    parsed = chat.parse(asyncio.run(chat.prompt_ids([USER])), [*turn, END_OF_TURN])
    assert parsed.calls == [ToolCall("multiply", {"a": 2, "b": 3})]
    again = rendered(chat, USER, parsed.message())
    assert 'So:\n<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>' in again


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_model_folder(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return folder


def build(folder, **chat):
    return build_chat_format(config(WORKER, model={"path": str(folder)}, chat=chat), SCHEMAS)


def test_the_remedy_is_named_where_the_template_knows_no_tools_and_works(folder):
    with pytest.raises(ConfigError, match=r'cannot be used with tools: .*; set chat.tools = "prompt"'):
        build(folder)
    assert build(folder, tools="prompt", system_prompt="Be brief.").tokenizer


def test_a_renderer_shows_the_tools_itself():
    with pytest.raises(ValidationError, match=r"chat.tools = prompt does nothing with chat.renderer = "):
        config(WORKER, chat={"tools": "prompt", "renderer": "qwen3"})


def test_the_template_to_copy_has_tools(folder):
    file = Path(__file__).parents[3] / "docs" / "chatml_with_tools.jinja"
    chat = build(folder, template=str(file))
    assert asyncio.run(check_tool_format(chat, SCHEMAS)).parallel_calls
    assert chat.tokenizer.chat_template == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM], ids=["system", "no system"])
async def test_episodes_with_tools_are_played_in_one_segment(template):
    run_config = config(WORKER, chat={"tools": "prompt"})

    def reply(text, index):
        results = re.findall(r"<tool_response>\n(.*)\n</tool_response>", text)
        return results[-1] if results else multiplying(text, index)

    run = await roll(task(), fake(scripted(TOKENIZER, reply)), config=run_config, tokenizer=build_tokenizer(template))
    assert [(rollout.reward, rollout.turns, len(rollout.segments)) for rollout in run.rollouts] == [(1.0, 2, 1)] * 2


async def test_an_agent_calls_tools_over_the_endpoint():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            reply = await client.ask(tools=[MULTIPLY])
            last = await client.ask([AGENT_USER, reply.message, *results_of(reply.message)], tools=[MULTIPLY])
        return float(last.message["content"] == "408")

    run_config = config(WORKER, chat={"tools": "prompt"})
    run = await roll(agent_task(agent), fake(), config=run_config, tokenizer=build_tokenizer(CHATML))
    assert [(rollout.reward, len(rollout.segments)) for rollout in run.rollouts] == [(1.0, 1)] * 2
