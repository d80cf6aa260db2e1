"""Anthropic's messages at the endpoint: the official client unchanged, and one conversation behind all APIs."""

import json
import re

import pytest

from slipstream.rollout_worker.agent.api.anthropic import AnthropicApi
from slipstream.rollout_worker.agent.api.anthropic_request import input_of
from slipstream.rollout_worker.agent.api.messages import ApiError
from slipstream.rollout_worker.agent.api.request import Reading
from tests import kit
from tests.kit.agent import MULTIPLY, USER, client_of
from tests.kit.api import conforms
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.fake_vllm.tokenizer import THINKING_TEMPLATE, build_tokenizer
from tests.kit.worker import TOKENIZER, fake, multiply
from tests.rollout_worker.agent.api.same_episode import CALL, plays_as, rolled

anthropic = pytest.importorskip("anthropic")
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent  # noqa: E402

FUNCTION = {name: MULTIPLY["function"][name] for name in ("name", "description", "parameters")}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
TOOL = {"name": "multiply", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
THINKER = build_tokenizer(THINKING_TEMPLATE)
ROOMY = kit.config(kit.WORKER, rollout={"max_episode_tokens": 2000}, vllm={"max_model_len": 2000})


def of(endpoint, **options):
    return anthropic.AsyncAnthropic(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)


def results(message):
    """Return the user's message that answers the tool use of a message."""
    found = [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(multiply(**block.input))}
        for block in message.content
        if block.type == "tool_use"
    ]
    return [{"role": "user", "content": found}] if found else []


async def by_chat(endpoint, prompt):
    async with client_of(endpoint) as client:
        messages = [{"role": "system", "content": "Be brief."}, *prompt]
        message = (await client.ask(messages, tools=[CHAT_TOOL])).message
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "408"} for call in message["tool_calls"]]
        await client.ask([*messages, message, *answers], tools=[CHAT_TOOL])


async def whole(endpoint, prompt):
    async with of(endpoint) as client:
        messages = list(prompt)
        while True:
            message = await client.messages.create(
                model=endpoint.model, max_tokens=64, messages=messages, tools=[TOOL], system="Be brief."
            )
            messages.append({"role": "assistant", "content": message.content})
            if not (found := results(message)):
                assert message.stop_reason == "end_turn"
                return
            assert message.stop_reason == "tool_use"
            messages += found


async def streamed(endpoint, prompt):
    async with of(endpoint) as client:
        messages = list(prompt)
        while True:
            system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
            ask = {"model": endpoint.model, "max_tokens": 64, "tools": [TOOL], "system": system}
            async with client.messages.stream(messages=messages, **ask) as stream:
                message = await stream.get_final_message()
            messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            if not (found := results(message)):
                return
            messages += found


@pytest.mark.parametrize("agent", [whole, streamed])
async def test_i4_a_tool_loop_is_the_same_segment_as_by_chat_completions(agent):
    await plays_as(by_chat, agent)


async def test_an_answer_and_its_events_are_of_the_types_of_the_client():
    kinds = []

    async def agent(endpoint, prompt):
        body = {"model": endpoint.model, "messages": prompt, "tools": [TOOL], "max_tokens": 64}
        body["metadata"] = {"user_id": "me"}
        async with client_of(endpoint) as client:
            first = (await client.post(json.dumps(body), "/messages")).body
            conforms(Message, first)
            assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
            assert first["content"][2]["input"] == {"a": 12, "b": 34}
            stream = await client.text(json.dumps({**body, "stream": True}), "/messages")
            count = (await client.post(json.dumps(body), "/messages/count_tokens")).body
            conforms(MessageTokensCount, count)
            assert count["input_tokens"] == first["usage"]["input_tokens"]
            model = (await client.get("/models/policy")).body
            conforms(ModelInfo, {name: value for name, value in model.items() if name in ModelInfo.model_fields})
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
        for each in events:
            conforms(RawMessageStreamEvent, each)
        assert [line[7:] for line in stream.splitlines() if line.startswith("event: ")] == [
            each["type"] for each in events
        ]
        assert events[-2]["usage"]["output_tokens"] == first["usage"]["output_tokens"]
        kinds.append([each["delta"].get("type") for each in events if "delta" in each])
        return 1.0

    said = f"<think>well</think>So: {CALL}"
    rollouts = await rolled(agent, fake(scripted(THINKER, in_turn([said]))), tokenizer=THINKER, config=ROOMY)
    assert kinds[0] == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", None]
    assert rollouts[0].turns == 2, "counting samples nothing"


@pytest.mark.parametrize("back", ["blocks", "nothing"])
async def test_thinking_is_a_block_and_its_answer_is_known_whether_it_comes_back_or_not(back):
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model, "tools": [TOOL], "max_tokens": 64}
            first = await client.messages.create(messages=prompt, **ask)
            thought, said = first.content
            assert (thought.type, thought.thinking, said.text) == ("thinking", "well", "four")
            assert thought.signature
            answer = {"role": "assistant", "content": first.content if back == "blocks" else [said]}
            await client.messages.create(messages=[*prompt, answer, {"role": "user", "content": "Why?"}], **ask)
        return 1.0

    server = fake(scripted(THINKER, lambda text, index: "<think>well</think>four"))
    (rollout, _) = await rolled(agent, server, tokenizer=THINKER, config=ROOMY)
    assert (len(rollout.segments), rollout.turns) == (1, 2)


async def test_results_and_text_in_one_message_are_read_in_their_order():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model, "max_tokens": 64, "tools": [TOOL]}
            first = await client.messages.create(messages=prompt, **ask)
            one, two = (block for block in first.content if block.type == "tool_use")
            answers = [
                {"type": "tool_result", "tool_use_id": two.id, "content": [{"type": "text", "text": "second"}]},
                {"type": "tool_result", "tool_use_id": one.id, "content": "first", "is_error": True},
                {"type": "text", "text": "And now?"},
            ]
            answer = {"role": "assistant", "content": first.content}
            await client.messages.create(messages=[*prompt, answer, {"role": "user", "content": answers}], **ask)
        return 1.0

    server = fake(scripted(TOKENIZER, in_turn([CALL + CALL, "done"])))
    (rollout, _) = await rolled(agent, server, config=ROOMY)
    (segment,) = rollout.segments
    text = TOKENIZER.decode(segment.token_ids, skip_special_tokens=False)
    first, second = '<tool_response>\n{"error": "first"}\n</tool_response>', "<tool_response>\nsecond\n</tool_response>"
    assert f"{first}\n{second}<|im_end|>" in text
    assert "<|im_start|>user\nAnd now?<|im_end|>" in text


async def test_arguments_that_are_no_object_come_back_as_they_were():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model, "max_tokens": 64, "tools": [TOOL]}
            first = await client.messages.create(messages=prompt, **ask)
            assert first.content[0].input == {"INVALID_JSON": "12 by 34"}
            answer = {"role": "assistant", "content": first.content}
            result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "no object"}
            await client.messages.create(messages=[*prompt, answer, {"role": "user", "content": [result]}], **ask)
        return 1.0

    said = '<tool_call>{"name": "multiply", "arguments": "12 by 34"}</tool_call>'
    (rollout, _) = await rolled(agent, fake(scripted(TOKENIZER, in_turn([said, "done"]))))
    assert (len(rollout.segments), rollout.turns) == (1, 2)


async def test_an_answer_says_why_it_ended():
    ends = []

    async def agent(endpoint):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model, "messages": [USER]}
            cut = await client.messages.create(max_tokens=2, **ask)
            stopped = await client.messages.create(max_tokens=64, stop_sequences=[" and"], **ask)
            ends.append([(each.stop_reason, each.stop_sequence) for each in (cut, stopped)])
            assert stopped.content[0].text == "words"
            assert cut.usage.output_tokens == 2
        return 1.0

    await rolled(agent, fake(scripted(TOKENIZER, lambda text, index: "words and words")))
    assert ends[0] == [("max_tokens", None), ("stop_sequence", " and")]


async def test_keys_models_and_errors_are_as_its_client_knows_them():
    async def agent(endpoint):
        async with of(endpoint) as client:
            assert [model.id async for model in client.models.list()] == [endpoint.model]
            assert (await client.models.retrieve(endpoint.model)).type == "model"
            with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
                await client.messages.create(model=endpoint.model, max_tokens=0, messages=[USER])
            assert caught.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(anthropic.NotFoundError, match="claude"):
                await client.messages.create(model="claude", max_tokens=9, messages=[USER])
        async with anthropic.AsyncAnthropic(base_url=endpoint.base_url, api_key="sk-slipstream-guess") as guess:
            with pytest.raises(anthropic.AuthenticationError):
                await guess.models.list()
        root = endpoint.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, auth_token=endpoint.api_key, api_key=None) as other:
            await other.messages.create(model=endpoint.model, max_tokens=64, messages=[USER])
        return 1.0

    await rolled(agent)


def read(given, refuse=False):
    reading = Reading(kit.config().rollout, 1.0, refuse)
    return AnthropicApi().read({"model": "policy", "max_tokens": 9, "messages": [USER], **given}, reading)


@pytest.mark.parametrize(
    ("fields", "counted", "words"),
    [
        ({"tools": [{**TOOL, "strict": True}]}, "strict", r"tools\[0\].strict"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "defer_loading", "leave it out"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice", "say in a message"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "multiply"}}, "tool_choice", "say in a message"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "parallel_tool_calls",
            "tool_choice.disable_parallel_tool_use: .*take the first",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking", "leave it out"),
        ({"output_config": {"effort": "low"}}, "reasoning_effort", "output_config.effort"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "response_format",
            r"output_config.format: .*rollout.top_k",
        ),
        ({"temperature": 0.1}, "temperature", "is not 1"),
        ({"top_k": 5}, "top_k", "is not 0"),
    ],
    ids=str,
)
def test_what_is_not_followed_is_named_in_the_words_of_the_request(fields, counted, words):
    (told,) = read(fields).asked.unenforced.items()
    assert told[0] == counted
    assert re.search(words, told[1])
    with pytest.raises(ApiError, match=words):
        read(fields, refuse=True)


def test_what_passes():
    plain = {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "service_tier": "auto", "speed": "fast"}
    assert read(plain, refuse=True).asked.max_tokens == 9
    assert read({"tools": [TOOL], "tool_choice": {"type": "none"}}).asked.tools == []
    assert read({"stop_sequences": ["END"], "max_tokens": None}).asked.stop == ("END",)
    assert read({"tools": [{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}]}).asked.tools == [
        CHAT_TOOL
    ]


BLOCK = {"type": "tool_result", "tool_use_id": "t", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [BLOCK]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[1].content[0]"),
        ({"messages": [USER] * 5000}, "messages"),
        ({"system": 3}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"output_config": 3}, "output_config"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_its_place(fields, param):
    with pytest.raises(ApiError) as caught:
        read(fields)
    assert caught.value.status == 400
    assert param in caught.value.params
    assert str(caught.value).startswith(param)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1.0, "b": [null]}', {"a": 1.0, "b": [None]}),
        ("", {"INVALID_JSON": ""}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
    ],
)
def test_an_input_is_always_an_object(arguments, found):
    assert input_of(arguments) == found
