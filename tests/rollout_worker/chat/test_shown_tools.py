"""A prompt shows names, values and types of tools' parameters at any depth, whatever the format's language for them."""

import asyncio
import json

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.format_check import check_tool_format, find_hidden_tools
from slipstream.rollout_worker.chat.shown_tools import plain, shown_tools
from slipstream.rollout_worker.chat.template import TemplateFormat
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, build_tokenizer
from tests.kit.renderer_cases import CASES as OF_RENDERERS
from tests.kit.template_cases import CASES as OF_TEMPLATES
from tests.kit.worker import END_OF_TURN, chat_format

USER = {"role": "user", "content": "first question"}

# As an MCP server or an agent's framework describes a tool.
PARAMETERS = {
    "type": "object",
    "$defs": {
        "Size": {"type": "string", "enum": ["smallish", "largish"]},
        "Stop": {
            "type": "object",
            "properties": {
                "platform": {"type": "integer"},
                "zone": {"type": "string", "enum": ["inner", "outer"], "description": "Which ring."},
            },
            "required": ["platform"],
        },
        "Branch": {
            "type": "object",
            "properties": {"leaf": {"type": "number"}, "twigs": {"type": "array", "items": {"$ref": "#/$defs/Branch"}}},
        },
    },
    "properties": {
        "size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}], "default": None, "description": "How big."},
        "level": {"enum": [3301, 3302], "type": "integer", "description": "Which floor."},
        "price": {"type": "number", "enum": [0.25, 17.5], "description": "What it costs."},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}, "description": "Where it halts."},
        "when": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}],
            "description": "Time.",
        },
        "rates": {"type": "object", "additionalProperties": {"enum": ["cheap", "dear"]}, "description": "By name."},
        "tree": {"$ref": "#/$defs/Branch", "description": "What grows."},
        "maybe": {"type": ["boolean", "null"], "description": "If at all."},
        "mode": {"const": "express", "description": "How fast."},
        "passes": {"type": "object", "patternProperties": {"^day": {"enum": ["weekly", "yearly"]}}},
        "type": {"type": "string", "enum": ["train", "ferry"], "description": "What moves."},
    },
    "required": ["level"],
}
WORDS = [
    *("smallish", "largish", "3301", "3302", "0.25", "17.5", "platform", "zone", "inner", "outer"),
    *(
        "cheap",
        "dear",
        "leaf",
        "twigs",
        "express",
        "How big",
        "Which floor",
        "What grows",
        "Which ring",
        "weekly",
        "yearly",
    ),
    *("train", "ferry", "What moves"),
]


def tool(**properties):
    parameters = {**PARAMETERS, "properties": properties} if properties else PARAMETERS
    return {
        "type": "function",
        "function": {"name": "travel", "description": "Plans a trip.", "parameters": parameters},
    }


def prompt(chat):
    return chat.tokenizer.decode(asyncio.run(chat.prompt_ids([USER])))


@pytest.mark.families("case")
@pytest.mark.parametrize("case", [*OF_TEMPLATES, *OF_RENDERERS], ids=lambda case: f"{case.how} {case.thinking}")
def test_a_format_that_takes_tools_shows_all_of_their_parameters(case):
    try:
        chat = case.build([tool()])
    except ConfigError:
        return
    if asyncio.run(find_hidden_tools(chat, [tool()])):
        return  # refused: it shows no tools
    text = prompt(chat)
    assert [word for word in WORDS if word not in text] == []


@pytest.mark.families("case")
@pytest.mark.parametrize("case", [*OF_TEMPLATES, *OF_RENDERERS], ids=lambda case: f"{case.how} {case.thinking}")
def test_another_type_gives_another_prompt(case):
    types = [{"type": "integer"}, {"type": "string"}, {"type": "boolean"}]
    for form in (
        lambda each: each,
        lambda each: {"anyOf": [each, {"type": "null"}]},
        lambda each: {"type": "array", "items": {"type": "array", "items": each}},
        lambda each: {"type": "object", "properties": {"inside": {"oneOf": [each, {"type": "null"}]}}},
    ):
        try:
            chats = [case.build([tool(given=form(each))]) for each in types]
        except ConfigError:
            return
        texts = {prompt(chat) for chat in chats}
        hidden = asyncio.run(find_hidden_tools(chats[0], [tool(given=form(types[0]))]))
        assert len(texts) == len(types) or hidden


# Python's signatures, as some families write tools: names, types and descriptions of the outer level.
SIGNATURES = CHAT_TEMPLATE.replace(
    "{{- tool | tojson }}",
    "{{- tool.function.name ~ '(' }}{%- for name, each in tool.function.parameters.properties | items %}"
    "{{- name ~ ': ' ~ {'string': 'str', 'integer': 'int', 'number': 'float'}.get(each.type, 'Any') ~ ', ' }}"
    "{{- each.description ~ '; ' }}{%- endfor %}{{- ') ' ~ tool.function.description }}",
)


def signatures(*tools):
    return TemplateFormat(build_tokenizer(SIGNATURES), [END_OF_TURN], list(tools), "my-model")


def test_what_a_language_has_no_words_for_stands_in_the_description():
    chat = signatures(tool())
    text = prompt(chat)
    assert [word for word in WORDS if word not in text] == []
    assert "level: int, Which floor. JSON schema: {" in text
    branch = text.partition("What grows. JSON schema: ")[2]
    found, _ = json.JSONDecoder().raw_decode(branch)
    assert found["$defs"]["Branch"]["properties"]["leaf"] == {"type": "number"}, "it refers to itself"
    assert asyncio.run(check_tool_format(chat, [tool()])).fit_for_tools


def test_a_parameter_that_is_shown_stays_as_it_is():
    """So does every parameter where schemas are written as JSON; and the tools that were given are not changed."""
    simple = {"type": "string", "description": "A name."}
    given = tool(name=simple, level=PARAMETERS["properties"]["level"])
    before = json.dumps(given)
    chat = signatures(given)
    written = shown_tools([given], chat._tried_tools)[0]["function"]["parameters"]["properties"]
    assert written["name"] == simple
    assert written["level"]["description"].startswith("Which floor. JSON schema: ")
    assert json.dumps(given) == before
    assert f'"name": "travel", "description": "Plans a trip.", "parameters": {json.dumps(PARAMETERS)}' in prompt(
        chat_format([tool()])
    )


def test_a_language_without_descriptions_has_it_in_the_tools_own():
    template = SIGNATURES.replace("{{- each.description ~ '; ' }}", "")
    chat = TemplateFormat(build_tokenizer(template), [END_OF_TURN], [tool()], "my-model")
    text = prompt(chat)
    assert 'JSON schema of level: {"enum": [3301, 3302], "type": "integer", "description": "Which floor."}' in text
    assert [word for word in WORDS if word not in text] == []


@pytest.mark.parametrize("name", ["type", "description", "properties"])
def test_a_parameter_that_a_language_takes_for_a_keyword_is_shown(name):
    template = SIGNATURES.replace(
        "parameters.properties | items %}", f"parameters.properties | items if name != '{name}' %}}"
    )
    given = tool(**{name: {"type": "string", "description": "What moves."}, "level": {"type": "integer"}})
    text = prompt(TemplateFormat(build_tokenizer(template), [END_OF_TURN], [given], "my-model"))
    assert f'JSON schema of {name}: {{"type": "string", "description": "What moves."}}' in text


def test_plain_schemas_have_no_references_and_no_null():
    sizes = plain(PARAMETERS["properties"]["size"], PARAMETERS)
    assert sizes == {
        "type": "string",
        "enum": ["smallish", "largish"],
        "default": None,
        "description": "How big.",
        "nullable": True,
    }
    assert plain({"type": ["boolean", "null"]}, {}) == {"type": "boolean", "nullable": True}
    either = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}
    assert plain(either, {}) == {"anyOf": either["anyOf"][:2], "nullable": True}
    assert plain({"$ref": "#/$defs/Gone"}, {"$defs": {}}) == {"$ref": "#/$defs/Gone"}


def test_references_that_multiply_stay():
    levels = {
        f"L{n}": {"type": "object", "properties": {x: {"$ref": f"#/$defs/L{n + 1}"} for x in "abcd"}} for n in range(9)
    }
    root = {"$defs": {**levels, "L9": {"type": "string"}}}
    assert plain({"$ref": "#/$defs/L0"}, root) == {"$ref": "#/$defs/L0"}
