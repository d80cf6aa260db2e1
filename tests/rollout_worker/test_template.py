import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.config import ConfigError
from rollout_worker.chat.base import PromptError
from rollout_worker.chat.template import TemplateFormat, load_tokenizer, stop_ids
from rollout_worker.task.tools import ToolBox
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, build_tokenizer, save_model_folder
from tests.kit.worker import END_OF_TURN, TOKENIZER, chat_format, multiply

SCHEMAS = ToolBox([multiply]).schemas
USER = {"role": "user", "content": "Multiply 2 by 3."}


def tool(content):
    return {"role": "tool", "name": "multiply", "content": content}


def with_template(template):
    return TemplateFormat(build_tokenizer(template), [END_OF_TURN], SCHEMAS, "my-model")


async def test_a_prompt_is_the_templates_text_tokenised_once():
    ids = await chat_format(SCHEMAS).prompt_ids([USER])
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nMultiply 2 by 3.<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "multiply"' in text


@pytest.mark.parametrize("prompt", [[{"role": "user"}], [{"role": "user", "content": 3}]])
async def test_a_prompt_that_cannot_be_rendered_is_told_from_a_bug(prompt):
    with pytest.raises(PromptError):
        await chat_format(SCHEMAS).prompt_ids(prompt)


async def test_a_text_prompt_is_taken_as_it_is():
    ids = await chat_format().prompt_ids("2 times 3 is")
    assert TOKENIZER.decode(ids) == "2 times 3 is"


@given(st.text(max_size=40), st.text(max_size=40))
def test_f18_turn_and_suffix_are_what_the_template_makes_of_the_whole(said, answered):
    """Appending the suffix to a turn gives the text that rendering the conversation anew would."""
    turn = {"role": "assistant", "content": said}
    whole = TOKENIZER.apply_chat_template(
        [USER, turn, tool(answered), tool("b")], tools=SCHEMAS, tokenize=False, add_generation_prompt=True
    )
    prompt = TOKENIZER.apply_chat_template([USER], tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    suffix = asyncio.run(chat_format(SCHEMAS).suffix_ids([], [END_OF_TURN], [tool(answered), tool("b")]))
    assert prompt + said + "<|im_end|>" + TOKENIZER.decode(suffix, skip_special_tokens=False) == whole


@pytest.mark.parametrize("said", ["<tool_call>{}</tool_call>", "", "half a wor"])
async def test_f18_a_turn_that_a_stop_string_ended_gets_its_end_of_turn_as_context(said):
    chat = chat_format(SCHEMAS)
    prompt = await chat.prompt_ids([USER])
    cut = TOKENIZER.encode(said, add_special_tokens=False)
    ended = [*cut, END_OF_TURN]
    after_cut, after_end = [await chat.suffix_ids(prompt, turn, [tool("6")]) for turn in (cut, ended)]
    assert cut + after_cut == ended + after_end


def test_a_turns_text_keeps_all_but_the_token_that_ended_it():
    chat = chat_format()
    call = "<tool_call>{}</tool_call>"
    ids = TOKENIZER.encode(call + "<|im_end|>", add_special_tokens=False)
    assert chat.parse([], ids).text == call
    assert chat.parse([], ids[:-1]).text == call


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}"
            "{% endfor %}{{ '>' if add_generation_prompt }}",
            "renders a turn differently",
        ),
        (CHAT_TEMPLATE.replace("+ message.content +", "+"), "leaves out tool messages|renders a turn differently"),
        (CHAT_TEMPLATE.replace('message.role == "tool"', 'message.role == "no"'), "leaves out tool messages"),
        (CHAT_TEMPLATE.replace("{{- '<|im_end|>\\n' }}", "{{- '\\n' }}"), "none of the stop tokens"),
        ("{{ raise_exception('no tools here') }}", "refuses a tool message"),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
            "{% if messages | length > 4 %}{{ '' }}{% endif %}".replace(
                "m.content", "(m.content if messages | length < 5 else m.content | upper)"
            ),
            "changes the earlier conversation",
        ),
    ],
)
def test_a_template_that_cannot_be_appended_to_is_refused_by_name(template, why):
    with pytest.raises(ConfigError, match=f"chat template of my-model cannot be used with tools: .*({why})"):
        with_template(template)


def test_a_template_that_renders_the_last_turn_differently_is_fine():
    """Qwen3 puts an empty thought into the last turn only; no turn is ever rendered here, so that does no harm."""
    template = CHAT_TEMPLATE.replace(
        "'<|im_start|>assistant\\n' + message.content",
        "'<|im_start|>assistant\\n' + ('' if not loop.last else '<think>') + message.content",
    )
    assert "<think>" in template
    with_template(template)


async def test_f19_a_long_text_is_tokenised_beside_the_loop():
    chat = chat_format(SCHEMAS)
    text = "Multiply 12 by 34. " * 10_000
    lags = []

    async def watch():
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - before)

    watcher = asyncio.create_task(watch())
    started = time.perf_counter()
    ids = await chat.prompt_ids(text)
    took = time.perf_counter() - started
    watcher.cancel()
    assert len(ids) > 10_000
    assert max(lags) < took / 4


def test_a_tokenizer_is_read_from_a_model_folder(tmp_path):
    save_model_folder(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    text = "Multiply 12 by 34.<|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False) == TOKENIZER.encode(text, add_special_tokens=False)
    assert stop_ids(str(tmp_path), tokenizer) == sorted([END_OF_TURN, TOKENIZER.convert_tokens_to_ids("<|endoftext|>")])


def test_a_folder_without_tokenizer_or_eos_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer.json.*save the tokenizer there"):
        load_tokenizer(str(tmp_path))
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has an eos token; set one"):
        stop_ids(str(tmp_path), tokenizer)
