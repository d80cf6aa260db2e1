import asyncio
import json
import re
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from slipstream.protocol.config import ConfigError, ModelSection
from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.chat.format_check import ToolFormatCheck, check_tool_format
from slipstream.rollout_worker.chat.parsers.base import UNCLOSED_THOUGHT, ToolCall
from slipstream.rollout_worker.chat.template import TemplateFormat, read_by
from slipstream.rollout_worker.chat.tokenizer import load_tokenizer, stop_ids
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, build_tokenizer, save_model_folder
from tests.kit.template_cases import templates_folder
from tests.kit.worker import END_OF_TURN, TOKENIZER, chat_format, multiply

SCHEMAS = ToolBox([multiply]).schemas
USER = {"role": "user", "content": "Multiply 2 by 3."}


def tool(content):
    return {"role": "tool", "name": "multiply", "content": content}


def model(path, **settings):
    return ModelSection(path=str(path), **settings)


def with_template(template, tools=SCHEMAS):
    return TemplateFormat(build_tokenizer(template), [END_OF_TURN], tools, "my-model")


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
def test_turn_and_suffix_are_what_the_template_makes_of_the_whole(said, answered):
    """Appending the suffix to a turn gives the text that rendering the conversation again would."""
    turn = {"role": "assistant", "content": said}
    whole = TOKENIZER.apply_chat_template(
        [USER, turn, tool(answered), tool("b")], tools=SCHEMAS, tokenize=False, add_generation_prompt=True
    )
    prompt = TOKENIZER.apply_chat_template([USER], tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    suffix = asyncio.run(chat_format(SCHEMAS).suffix_ids([], [END_OF_TURN], [tool(answered), tool("b")]))
    assert prompt + said + "<|im_end|>" + TOKENIZER.decode(suffix, skip_special_tokens=False) == whole


@pytest.mark.parametrize("said", ["<tool_call>{}</tool_call>", "", "half a wor"])
async def test_a_turn_that_a_stop_string_ended_gets_its_end_of_turn_as_context(said):
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
            "leaves out",
        ),
        (CHAT_TEMPLATE.replace("+ message.content +", "+"), "leaves out tool messages"),
        (CHAT_TEMPLATE.replace('message.role == "tool"', 'message.role == "no"'), "leaves out tool messages"),
        (CHAT_TEMPLATE.replace("{{- '<|im_end|>\\n' }}", "{{- '\\n' }}"), "none of the stop tokens"),
        ("{{ raise_exception('no tools here') }}", "refuses a tool message"),
        (
            CHAT_TEMPLATE.replace("(call.function | tojson)", "[].append(call)"),
            "refuses a turn that calls a tool .*'append' of 'list' object is unsafe",
        ),
        (
            CHAT_TEMPLATE.replace('message.role == "tool"', "message.role == 'no'").replace(
                "(call.function | tojson)", "call.plan.steps"
            ),
            "refuses a tool message .*has no attribute 'plan'",
        ),
        (CHAT_TEMPLATE.replace("message.tool_calls or []", "[]"), "leaves out the tool calls"),
        (
            CHAT_TEMPLATE.replace(
                "(call.function | tojson)", "call.function.name + (call.function.arguments | tojson)"
            ),
            "none of the notations",
        ),
    ],
)
def test_a_template_that_cannot_be_used_with_tools_is_refused_by_name(template, why):
    with pytest.raises(ConfigError, match=f"chat template of my-model cannot be used with tools: .*({why})"):
        with_template(template)


@pytest.mark.parametrize("tools", [[], SCHEMAS])
def test_i7_a_syntax_error_in_a_template_is_named_with_its_line(tools):
    told = "^the chat template of my-model has a syntax error, line 2: Expected an expression.*; fix it there"
    with pytest.raises(ConfigError, match=told):
        with_template("{% for m in messages %}{{ m.content }}\n{{ }}{% endfor %}", tools)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (CHAT_TEMPLATE.replace("{{- tool | tojson }}", ""), "does not show the tool 'multiply'"),
        (
            CHAT_TEMPLATE.replace("'<|im_start|>user\\n' + message.content", "messages | length ~ message.content"),
            "the conversation changes when",
        ),
        (
            CHAT_TEMPLATE.replace(
                "'\\n<tool_response>\\n'", "'\\n' ~ messages[1].tool_calls[0].function.arguments | length"
            ),
            "what would be appended",
        ),
        (
            CHAT_TEMPLATE.replace(
                "'<|im_start|>assistant\\n' + message",
                "('' if messages[loop.index0 - 1].role == 'tool' else '<|im_start|>assistant\\n') + message",
            ),
            "a second round: the conversation changes",
        ),
        (
            CHAT_TEMPLATE.replace(
                "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n",
                "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n<think>\\n",
            ),
            "the conversation changes when",
        ),
    ],
)
def test_a_template_that_is_not_what_it_seems_is_found_by_the_start_check(template, why):
    proof = asyncio.run(check_tool_format(with_template(template), SCHEMAS))
    assert not proof.fit_for_tools
    assert why in "; ".join(proof.problems)
    assert all("chat.template" in problem and "chat.renderer" in problem for problem in proof.problems)


def test_the_start_check_names_a_parser_that_does_not_read_the_templates_calls():
    chat = TemplateFormat(TOKENIZER, [END_OF_TURN], SCHEMAS, "my-model", parser="mistral")
    proof = asyncio.run(check_tool_format(chat, SCHEMAS))
    assert (proof.schemas_shown, proof.suffix_exact, proof.call_parses_back) == (True, True, False)
    assert "is read as no call; name the notation with chat.parser" in proof.problems[0]
    assert not proof.fit_for_tools


def test_without_tools_there_is_nothing_to_prove():
    assert asyncio.run(check_tool_format(chat_format(), [])) == ToolFormatCheck()


def test_a_template_that_renders_the_last_turn_differently_is_fine():
    """Qwen3 puts an empty thought into the last turn only; no turn is ever rendered here, so that does no harm."""
    template = CHAT_TEMPLATE.replace(
        "'<|im_start|>assistant\\n' + message.content",
        "'<|im_start|>assistant\\n' + ('' if not loop.last else '<think>') + message.content",
    )
    assert "<think>" in template
    assert asyncio.run(check_tool_format(with_template(template), SCHEMAS)).fit_for_tools


async def test_a_long_text_is_tokenised_beside_the_loop():
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
    tokenizer = load_tokenizer(model(tmp_path))
    text = "Multiply 12 by 34.<|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False) == TOKENIZER.encode(text, add_special_tokens=False)
    ends = [END_OF_TURN, TOKENIZER.convert_tokens_to_ids("<|endoftext|>")]
    assert stop_ids(model(tmp_path), tokenizer) == sorted(ends)


def test_a_tokenizer_apart_from_the_model_is_taken(tmp_path):
    save_model_folder(tmp_path / "apart")
    settings = model(tmp_path / "nowhere", tokenizer=str(tmp_path / "apart"))
    assert len(load_tokenizer(settings)) == len(TOKENIZER)
    with pytest.raises(ConfigError, match=r"model.tokenizer = .*nowhere"):
        load_tokenizer(model(tmp_path / "apart", tokenizer=str(tmp_path / "nowhere")))


def test_a_revision_is_asked_for_and_named_where_it_cannot_be_had(monkeypatch):
    asked = []
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "from_pretrained", lambda path, **options: asked.append((path, options)) or TOKENIZER
    )
    load_tokenizer(model("hub/name", revision="v2"))
    load_tokenizer(model("hub/name", revision="v2", tokenizer="hub/another"))  # a revision is the model's
    assert asked == [("hub/name", {"revision": "v2"}), ("hub/another", {})]


def test_a_folder_without_tokenizer_or_eos_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path = .*no tokenizer.json.*save the tokenizer there"):
        load_tokenizer(model(tmp_path))
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has an eos token; set one"):
        stop_ids(model(tmp_path), tokenizer)


@pytest.mark.parametrize("text", [b"{not json", b"\xff\xfe", b"[1]"])
def test_a_generation_config_that_cannot_be_read_is_named(text, tmp_path):
    (tmp_path / "generation_config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"generation_config.json .*mend the file, or delete it"):
        stop_ids(model(tmp_path), TOKENIZER)


def test_a_tokenizer_that_is_the_models_own_code_is_loaded_only_where_that_is_allowed(tmp_path, monkeypatch):
    asked = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(path, **options):
            asked.append((path, options))
            if "broken" in path:
                raise ImportError("no such module")
            return TOKENIZER

    monkeypatch.setitem(vars(sys.modules["transformers"]), "AutoTokenizer", AutoTokenizer)
    with pytest.raises(ConfigError, match=r"no tokenizer.json"):
        load_tokenizer(model(tmp_path))
    assert not asked
    assert load_tokenizer(model(tmp_path, trust_remote_code=True)) is TOKENIZER
    assert asked == [(str(tmp_path), {"trust_remote_code": True})]
    with pytest.raises(ConfigError, match=r"nor with the model's own code \(ImportError: no such module\)"):
        load_tokenizer(model(tmp_path / "broken", trust_remote_code=True))


def loaded(tmp_path, tools=SCHEMAS, **chat):
    save_model_folder(tmp_path / "model")
    return TemplateFormat.load(config(WORKER, model={"path": str(tmp_path / "model")}, chat=chat), tools)


async def test_a_file_takes_the_place_of_the_tokenizers_template(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(CHAT_TEMPLATE.replace("# Tools", "# My tools"), encoding="utf-8")
    chat = loaded(tmp_path, template=str(file))
    assert "# My tools" in TOKENIZER.decode(await chat.prompt_ids([USER]))
    assert "# My tools" in chat.tokenizer.chat_template  # of which the fingerprint is taken


def test_a_template_file_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"chat.template = .*nowhere.jinja: the template cannot be read"):
        loaded(tmp_path, template=str(tmp_path / "nowhere.jinja"))
    file = tmp_path / "broken.jinja"
    file.write_text("{% if %}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"chat template of chat.template = .*broken.jinja"):
        loaded(tmp_path, template=str(file))


async def test_chat_template_kwargs_reach_the_template(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(CHAT_TEMPLATE.replace("# Tools", "# {{ mood }} tools"), encoding="utf-8")
    file.write_text(CHAT_TEMPLATE + "{{ mood | default('') }}", encoding="utf-8")
    chat = loaded(tmp_path, template=str(file), chat_template_kwargs={"mood": "bright"})
    ids = await chat.prompt_ids([USER])
    assert TOKENIZER.decode(ids).endswith("assistant\nbright")
    suffix = await chat.suffix_ids(ids, [END_OF_TURN], [tool("6")])
    assert TOKENIZER.decode(suffix).endswith("assistant\nbright")


def test_a_variable_that_the_template_does_not_read_is_refused_with_those_that_it_reads(tmp_path):
    """A misspelt one would change nothing, and nobody would see it."""
    file = tmp_path / "mine.jinja"
    reads = (
        "{% if mood is not defined %}{% set mood = '' %}{% endif %}{{ mood }}{{ bos_token }}{% set own = 1 %}{{ own }}"
    )
    file.write_text(CHAT_TEMPLATE + reads, encoding="utf-8")
    loaded(tmp_path, template=str(file), chat_template_kwargs={"mood": "bright"})
    told = r"chat_template_kwargs: the template reads no variable 'mod', .*; it reads bos_token, mood: correct the name"
    with pytest.raises(ConfigError, match=told):
        loaded(tmp_path, template=str(file), chat_template_kwargs={"mod": "bright"})


def test_what_a_template_reads_is_told_of_each_that_trl_ships():
    """Those that train too, whose `generation` blocks are transformers' own."""
    for file in sorted(templates_folder().glob("*.jinja")):
        source = re.sub(r"\{#.*?#\}", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        read = read_by(source)
        assert "messages" in read or "loop_messages" in source
        assert ("enable_thinking" in read) == bool(re.search(r"(?<![\w.'\"])enable_thinking", source)), file.stem


def test_a_parser_that_there_is_not_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"chat.parser = nonsense: there is no such parser; take auto, one of hermes"):
        loaded(tmp_path, parser="nonsense")
    with pytest.raises(ConfigError, match=r"chat.parser = response_template: there is no such parser"):
        loaded(tmp_path, parser="response_template")  # the tokenizer has none


def test_a_parser_of_ones_own_reads_the_turns(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import json, re\n"
        "def calls(text):\n"
        "    found = [json.loads(call) for call in re.findall('<tool_call>(.*?)</tool_call>', text, re.DOTALL)]\n"
        "    return [(call['name'], call['arguments']) for call in found]\n",
        encoding="utf-8",
    )
    chat = loaded(tmp_path, parser=f"{file}:calls")
    assert chat.parser_name == f"{file}:calls"
    assert asyncio.run(check_tool_format(chat, SCHEMAS)).fit_for_tools


def test_auto_takes_the_tokenizers_response_template_where_it_reads_the_calls_and_else_a_notation():
    def chosen(opens):
        tokenizer = build_tokenizer()
        call = {"open": opens, "close": "</tool_call>", "repeats": True, "content": "json"}
        call["transform"] = {"type": "function", "function": "{content}"}
        ends = {"close_pattern": r"<\|im_end\|>\s*|$", "content": "text"}
        tokenizer.response_template = {
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {"tool_calls": call, "content": ends},
        }
        chat = TemplateFormat(tokenizer, [END_OF_TURN], SCHEMAS, "my-model")
        assert asyncio.run(check_tool_format(chat, SCHEMAS)).fit_for_tools
        return chat.parser_name

    assert chosen("<tool_call>") == "response template"
    assert chosen("<something else>") == "hermes"


async def test_a_prompt_that_ends_in_an_assistants_message_is_continued():
    chat = chat_format(SCHEMAS)
    ids = await chat.prompt_ids([USER, {"role": "assistant", "content": "The product is"}])
    assert TOKENIZER.decode(ids).endswith("<|im_start|>assistant\nThe product is")
    assert await chat.prompt_ids([USER, {"role": "assistant", "content": ""}]) == await chat.prompt_ids([USER])
    call = {"type": "function", "function": {"name": "multiply", "arguments": {}}}
    with pytest.raises(PromptError, match="no tool message answers"):
        await chat.prompt_ids([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])


async def test_i9_a_call_inside_a_thought_that_the_prompt_began_is_not_a_call():
    chat = chat_format(SCHEMAS)
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
    turn = TOKENIZER.encode(f" or {call}", add_special_tokens=False)
    called = [ToolCall("multiply", {"a": 2, "b": 3})]
    cases = [("<think>I could", [UNCLOSED_THOUGHT]), ("<think>I could</think>", called), ("I could", called)]
    for begun, calls in cases:
        prompt = await chat.prompt_ids([USER, {"role": "assistant", "content": begun}])
        assert chat.parse(prompt, turn).calls == calls
        long = await chat.prompt_ids([USER, {"role": "assistant", "content": begun + " well" * 500}])
        assert chat.parse(long, turn).calls == calls
    # What a user or a tool writes opens no thought of the policy's.
    prompt = await chat.prompt_ids([{"role": "user", "content": "Say <think> twice: <think>"}])
    assert len(chat.parse(prompt, turn).calls) == 1


MISTRAL = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
{%- for message in messages %}
{%- if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.role == "tool" %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception("ids have nine characters") }}
{%- endif -%}
[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif message.tool_calls is defined and message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ", " if not loop.last }}
{%- endfor %}]<|im_end|>
{%- else %}{{ message.content }}<|im_end|>{% endif %}
{%- endfor %}"""


async def test_a_call_has_mistrals_nine_characters_and_its_answer_names_it():
    chat = with_template(MISTRAL)
    assert chat.parser_name == "mistral"
    assert (await check_tool_format(chat, SCHEMAS)).fit_for_tools
    prompt = await chat.prompt_ids([USER])

    def turn(call_id):
        calls = [{"name": "multiply", "arguments": {"a": 2, "b": 3}, **call_id}]
        return [*TOKENIZER.encode(f"[TOOL_CALLS]{json.dumps(calls)}", add_special_tokens=False), END_OF_TURN]

    async def answered(call, ids):
        suffix = await chat.suffix_ids(prompt, ids, [{**tool("6"), "tool_call_id": call.id}])
        return TOKENIZER.decode(suffix)

    (given,) = chat.parse(prompt, turn({"id": "abcDEF123"})).calls
    assert given.id == "abcDEF123"
    assert '"call_id": "abcDEF123"' in await answered(given, turn({}))
    for wrong in ({}, {"id": "short"}, {"id": 3}):
        (without,) = chat.parse(prompt, turn(wrong)).calls
        assert re.fullmatch("[A-Za-z0-9]{9}", without.id)
        assert f'"call_id": "{without.id}"' in await answered(without, turn(wrong))
        (later,) = chat.parse([*prompt, *turn(wrong)], turn(wrong)).calls
        assert later.id != without.id
    # A data set's conversation whose calls have none, or some have.
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "6"}]
    (written,) = re.findall('"id": "(.{9})"', text := TOKENIZER.decode(await chat.prompt_ids(said)))
    assert f'"call_id": "{written}"' in text
    named = {**call, "id": "abcDEF123"}
    answers = [{"role": "tool", "tool_call_id": "abcDEF123", "content": "5"}, {"role": "tool", "content": "6"}]
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [named, call]}, *answers]
    first, second = re.findall('"id": "(.{9})"', text := TOKENIZER.decode(await chat.prompt_ids(said)))
    assert first == "abcDEF123"
    assert f'"5", "call_id": "{first}"' in text
    assert f'"6", "call_id": "{second}"' in text
    # Calls that another model made: each answer has the id of its own call.
    calls = [{**call, "id": f"toolu_01{name}"} for name in "ab"]
    answers = [{"role": "tool", "tool_call_id": f"toolu_01{name}", "content": name} for name in "ba"]
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [*calls, named]}, *answers]
    first, second, own = re.findall('"id": "(.{9})"', text := TOKENIZER.decode(await chat.prompt_ids(said)))
    assert own == "abcDEF123"
    assert len({first, second, own}) == 3
    assert f'"a", "call_id": "{first}"' in text
    assert f'"b", "call_id": "{second}"' in text


@pytest.mark.parametrize(
    "arguments",
    ["{{- call.function.arguments -}}", "{{- '{' + call.function.arguments[1:] -}}"],
    ids=["as is", "sliced"],
)
def test_arguments_are_json_text_for_a_template_that_takes_them_so(arguments):
    call = "'\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>'"
    assert call in CHAT_TEMPLATE
    names = (
        '\'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}' + arguments + "{{- '}</tool_call>'"
    )
    chat = with_template(CHAT_TEMPLATE.replace(call, names))
    assert chat.parser_name == "hermes"
    assert asyncio.run(check_tool_format(chat, SCHEMAS)).fit_for_tools


def test_text_is_a_part_for_a_template_that_reads_it_so_beside_calls_alone():
    chat = with_template(
        CHAT_TEMPLATE.replace(
            "{%- for message in messages %}",
            "{%- macro text(m) %}{{ m.content if m.content is string else m.content[0].text }}{% endmacro %}"
            "{%- for message in messages %}",
            1,
        )
        .replace("\\n' + message.content", "\\n' + text(message)")
        .replace("message.tool_calls or []", "message.tool_calls or [] if message.content[0].type")
    )
    assert asyncio.run(check_tool_format(chat, SCHEMAS)).fit_for_tools


async def test_calls_of_a_conversation_are_written_without_tools_of_the_task_too():
    as_text = CHAT_TEMPLATE.replace("(call.function | tojson)", "call.function.name + call.function.arguments")
    said = [USER, called(("a", "f", {"n": 1})), tool("6")]
    assert 'f{"n": 1}' in TOKENIZER.decode(await with_template(as_text, []).prompt_ids(said))


async def test_messages_that_the_template_refuses_open_a_segment():
    refusing = CHAT_TEMPLATE.replace(
        'message.role == "tool" %}',
        "message.role == \"tool\" %}{% if 'no' in message.content %}{{ raise_exception('no') }}{% endif %}",
    )
    chat = with_template(refusing)
    prompt = await chat.prompt_ids([USER])
    assert await chat.suffix_ids(prompt, [END_OF_TURN], [tool("yes")]) is not None
    assert await chat.suffix_ids(prompt, [END_OF_TURN], [tool("no")]) is None


@pytest.mark.parametrize(("opens", "closes"), [("[THINK]", "[/THINK]"), ("<reason>", "</reason>")])
async def test_reasoning_that_a_template_takes_as_a_block_of_the_content_is_told_from_calls(opens, closes):
    """Templates of Ministral 3 and Magistral read no field of reasoning."""
    chat = with_template(
        "{{ tools | tojson }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
        f"{{% if part.type == 'thinking' %}}{{{{ '{opens}' + part.thinking + '{closes}' }}}}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "{% for call in m.tool_calls or [] %}"
        "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    assert chat.parser_name == "mistral"
    prompt = await chat.prompt_ids([USER])
    call = '[TOOL_CALLS]multiply[ARGS]{"a": 2, "b": 3}'

    def parsed(text):
        return chat.parse(prompt, [*TOKENIZER.encode(text, add_special_tokens=False), END_OF_TURN])

    turn = parsed(f"{opens}I could {call}, or not.{closes}It is 6.")
    assert (turn.reasoning, turn.content, turn.calls) == (f"I could {call}, or not.", "It is 6.", [])
    assert parsed(f"{opens}I could {call}").calls == [UNCLOSED_THOUGHT]
    turn = parsed(f"{opens}Hm.{closes}I ask.{call}")
    assert (turn.reasoning, turn.content) == ("Hm.", "I ask.")
    assert [call.name for call in turn.calls] == ["multiply"]
    whole = TOKENIZER.decode(await chat.prompt_ids([USER, turn.message(), tool("6")]), skip_special_tokens=False)
    assert f"{opens}Hm.{closes}I ask.{call}<|im_end|>" in whole
    suffix = await chat.suffix_ids(prompt, [END_OF_TURN], [USER])
    assert suffix is not None, "nothing is left out of earlier turns"


def test_a_template_that_writes_a_list_of_parts_as_it_is_takes_no_reasoning():
    chat = with_template(CHAT_TEMPLATE.replace("message.content", "(message.content ~ '')"))
    assert chat.reasoning.field is None


# Reads a turn's calls where the field is there, and pairs results with calls by their place.
BY_PLACE = """{%- for message in messages %}
{%- if message.tool_calls is defined %}
{%- for call in message.tool_calls %}{{ call.function.name }}({% for key, value in call.function.arguments.items() %}
{{- key }}={{ value }}{% endfor %});{% endfor %}
{%- else %}{{ message.content }};{% endif %}{% endfor %}"""


def called(*calls):
    functions = [
        (id, {"name": name, **({"arguments": given} if given is not ... else {})}) for id, name, given in calls
    ]
    calls = [{"id": id, "type": "function", "function": function} for id, function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def answering(id, content):
    return {"role": "tool", "tool_call_id": id, "content": content}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "assistant", "content": "said", "tool_calls": ()}], "said;"),
        ([called(("a", "f", " null\n"), ("b", "g", None), ("c", "h", ...)), answering("c", "3")], "f();g();h();3;"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": " "}]}], "f();"),
        (
            [
                called(("a", "f", "{}"), ("b", "g", '{"x": 1}'), ("c", "h", {})),
                *(answering(id, id * 2) for id in "cab"),
                {"role": "assistant", "content": "said"},
            ],
            "f();g(x=1);h();aa;bb;cc;said;",
        ),
        # Where an id is missing the place counts.
        (
            [called(("a", "f", "{}"), ("b", "g", "{}")), answering("b", "2"), {"role": "tool", "content": "1"}],
            "f();g();2;1;",
        ),
    ],
    ids=["no calls", "no arguments", "flat call", "order", "a missing id"],
)
async def test_calls_of_a_history_are_rendered_in_one_form(messages, text):
    chat = with_template(BY_PLACE, tools=())
    ids = await chat.prompt_ids([USER, *messages, USER])
    assert chat.tokenizer.decode(ids) == f"{USER['content']};{text}{USER['content']};"


async def test_arguments_that_are_no_object_are_named_where_a_template_takes_no_other():
    with pytest.raises(PromptError, match=r"message 1: the arguments of 'g' are '3'; give a JSON object"):
        await with_template(BY_PLACE, tools=()).prompt_ids([USER, called(("a", "f", "{}"), ("b", "g", "3")), USER])
