"""OpenAI's responses at the endpoint: the official client unchanged, and one conversation behind all APIs."""

import json
import re

import pytest
from pydantic import BaseModel

from slipstream.protocol.config.sections.sampling import keeps_mask
from slipstream.rollout_worker.agent.api.messages import ApiError
from slipstream.rollout_worker.agent.api.request import Reading
from slipstream.rollout_worker.agent.api.responses import ResponsesApi
from tests import kit
from tests.kit.agent import MULTIPLY, USER, client_of
from tests.kit.api import conforms
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.fake_vllm.tokenizer import THINKING_TEMPLATE, build_tokenizer
from tests.kit.worker import TOKENIZER, fake, multiply
from tests.rollout_worker.agent.api.same_episode import CALL, plays_as, rolled

openai = pytest.importorskip("openai")
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

TOOL = {"type": "function", "strict": False, **MULTIPLY["function"]}
# As clients write it, without what transformers adds to a schema.
PLAIN_TOOL = {name: value for name, value in TOOL.items() if name != "return"}
THINKER = build_tokenizer(THINKING_TEMPLATE)


def of(endpoint, **options):
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)


def outputs(response):
    """Return the outputs of the calls in a response."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": str(multiply(**json.loads(item.arguments))),
        }
        for item in response.output
        if item.type == "function_call"
    ]


async def by_chat(endpoint, prompt):
    async with of(endpoint) as client:
        messages = list(prompt)
        for _ in range(2):
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[MULTIPLY])
            message = reply.choices[0].message
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "408"} for call in message.tool_calls or []
            ]


async def by_items(endpoint, prompt):
    async with of(endpoint) as client:
        items = list(prompt)
        while True:
            response = await client.responses.create(model=endpoint.model, input=items, tools=[TOOL])
            items += response.output
            if not (found := outputs(response)):
                return
            items += found


async def by_previous_response(endpoint, prompt):
    async with of(endpoint) as client:
        response = await client.responses.create(model=endpoint.model, input=prompt, tools=[TOOL])
        while found := outputs(response):
            response = await client.responses.create(
                model=endpoint.model, input=found, tools=[TOOL], previous_response_id=response.id
            )


async def by_references(endpoint, prompt):
    async with of(endpoint) as client:
        first = await client.responses.create(model=endpoint.model, input=prompt, tools=[TOOL])
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        await client.responses.create(model=endpoint.model, input=[*prompt, *references, *outputs(first)], tools=[TOOL])


async def by_events(endpoint, prompt):
    async with of(endpoint) as client:
        items = list(prompt)
        while True:
            async with client.responses.stream(model=endpoint.model, input=items, tools=[TOOL]) as stream:
                response = await stream.get_final_response()
            items += [item.model_dump(exclude={"parsed", "parsed_arguments"}) for item in response.output]
            if not (found := outputs(response)):
                return
            items += found


@pytest.mark.parametrize("agent", [by_items, by_previous_response, by_references, by_events])
async def test_i4_a_tool_loop_is_the_same_segment_as_by_chat_completions(agent):
    await plays_as(by_chat, agent)


async def test_an_answer_and_its_events_are_of_the_types_of_the_client():
    kinds = []

    async def agent(endpoint, prompt):
        body = {
            "model": endpoint.model,
            "input": prompt,
            "tools": [PLAIN_TOOL],
            "instructions": "Be brief.",
            "user": "me",
        }
        body |= {"include": ["message.output_text.logprobs"], "text": {"format": {"type": "text"}}}
        async with client_of(endpoint) as client:
            first = (await client.post(json.dumps(body), "/responses")).body
            conforms(Response, first)
            assert (first["instructions"], first["user"], first["status"]) == ("Be brief.", "me", "completed")
            assert first["output"][0]["content"][0]["text"] == "So:"
            assert len(first["output"][0]["content"][0]["logprobs"]) == first["usage"]["output_tokens"]
            stream = await client.text(json.dumps({**body, "stream": True}), "/responses")
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
        for each in events:
            conforms(ResponseStreamEvent, each)
        named = [line[7:] for line in stream.splitlines() if line.startswith("event: ")]
        assert named == [each["type"] for each in events]
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        kinds.append([name.removeprefix("response.") for name in named])
        same = {name: value for name, value in events[-1]["response"].items() if name in ("usage", "instructions")}
        assert same == {name: first[name] for name in same}
        return 1.0

    await rolled(agent, fake(scripted(TOKENIZER, in_turn(["So: " + CALL]))))
    text, call = ["output_text.delta", "output_text.done"], "function_call_arguments"
    assert kinds[0] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", *text, "content_part.done", "output_item.done"),
        *("output_item.added", f"{call}.delta", f"{call}.done", "output_item.done", "completed"),
    ]


@pytest.mark.parametrize("back", ["items", "ids", "nothing"])
async def test_reasoning_is_an_item_and_its_answer_is_known_whether_it_comes_back_or_not(back):
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model, "tools": [PLAIN_TOOL], "include": ["reasoning.encrypted_content"]}
            first = await client.responses.create(input=prompt, **ask)
            thought, said = first.output
            assert (thought.type, thought.content[0].text, said.content[0].text) == ("reasoning", "well", "four")
            conforms(Response, first.model_dump(mode="json", exclude_unset=True, by_alias=True))
            thoughts = {
                "items": [thought.model_dump()],
                "ids": [{"type": "reasoning", "id": thought.id, "summary": []}],
                "nothing": [],
            }
            items = [*prompt, *thoughts[back], said.model_dump(), {"role": "user", "content": "Why?"}]
            await client.responses.create(input=items, **ask)
            async with client.responses.stream(input=prompt, **ask) as stream:
                kinds = [event.type async for event in stream]
            assert "response.reasoning_text.delta" in kinds
        return 1.0

    server = fake(scripted(THINKER, lambda text, index: "<think>well</think>four"))
    roomy = kit.config(kit.WORKER, rollout={"max_episode_tokens": 2000}, vllm={"max_model_len": 2000})
    rollout = (await rolled(agent, server, tokenizer=THINKER, config=roomy))[0]
    one, streamed = rollout.segments
    assert one.sampled_tokens == 2 * streamed.sampled_tokens


async def test_a_request_goes_on_from_what_is_stored_and_from_nothing_else():
    async def agent(endpoint):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model}
            kept = await client.responses.create(input="Hello.", instructions="Be brief.", **ask)
            other = await client.responses.create(input="Hello.", store=False, **ask)
            with pytest.raises(openai.BadRequestError, match=r"previous_response_id.*store = true") as caught:
                await client.responses.create(input="And?", previous_response_id=other.id, **ask)
            assert caught.value.code == "previous_response_not_found"
            # As OpenAI has it, instructions are those of the request alone.
            again = await client.responses.create(input="And?", previous_response_id=kept.id, **ask)
            assert (again.previous_response_id, again.instructions) == (kept.id, None)
        return 1.0

    rollout = (await rolled(agent))[0]
    last = TOKENIZER.decode(rollout.segments[-1].token_ids)
    assert "Hello." in last
    assert "And?" in last
    assert "Be brief." not in last


async def test_an_answer_that_is_cut_off_says_so():
    async def agent(endpoint):
        async with of(endpoint) as client:
            response = await client.responses.create(model=endpoint.model, input="Hello.", max_output_tokens=2)
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (response.usage.output_tokens, response.output[0].status) == (2, "incomplete")
            async with client.responses.stream(model=endpoint.model, input="Hello.", max_output_tokens=2) as stream:
                assert [event.type async for event in stream][-1] == "response.incomplete"
        return 1.0

    await rolled(agent, fake(scripted(TOKENIZER, lambda text, index: "words and words")))


class Number(BaseModel):
    value: int


async def test_structured_output_is_parsed_and_held_where_the_learner_can_follow():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            response = await client.responses.parse(model=endpoint.model, input=prompt, text_format=Number)
            assert response.output_parsed == Number(value=408)
        return 1.0

    masked = kit.config(kit.WORKER, rollout={"top_k": 9})
    assert keeps_mask(masked.rollout)
    server = fake(scripted(TOKENIZER, lambda text, index: '{"value": 408}'))
    await rolled(agent, server, config=masked)
    sent = [request["sampling_params"]["structured_outputs"]["json"] for request in server.requests]
    assert all(schema["required"] == ["value"] for schema in sent)
    plain = fake(scripted(TOKENIZER, lambda text, index: '{"value": 408}'))
    (rollout, _) = await rolled(agent, plain)
    assert rollout.metrics["agent/unenforced/response_format"] == 1.0


def read(given, refuse=False, api=None):
    reading = Reading(kit.config().rollout, 1.0, refuse)
    return (api or ResponsesApi()).read({"model": "policy", "input": "Hello.", **given}, reading)


def test_the_items_of_one_turn_are_one_message():
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "s"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    out = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]}
    items = [USER, thought, said, call, {**call, "call_id": "d"}, out, {**out, "call_id": "d"}, thought, call, out]
    messages = read({"input": items, "instructions": "i"}).messages
    assert [message.role for message in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "tool")
    ]
    first, second = messages[2], messages[5]
    assert (first.reasoning, first.content, [each.id for each in first.calls]) == ("t", "s", ["c", "d"])
    assert (second.reasoning, second.content, len(second.calls)) == ("t", None, 1)
    # Until outputs come, items belong to the turn of the calls.
    between = [USER, thought, call, said, thought, {**call, "call_id": "d"}, said, {**out, "call_id": "d"}, out, said]
    messages = read({"input": [*between, USER]}).messages
    assert [message.role for message in messages] == [*("user", "assistant", "tool", "tool", "assistant", "user")]
    turn = messages[1]
    assert (turn.reasoning, turn.content, [each.id for each in turn.calls]) == ("t\n\nt", "s\n\ns", ["c", "d"])
    # An output belongs to its call, whatever stands between the two.
    note = {"type": "message", "role": "system", "content": "note"}
    apart = [USER, call, {**call, "call_id": "d"}, out, note, {**out, "call_id": "d"}]
    messages = read({"input": apart}).messages
    assert [(message.role, message.answers) for message in messages[2:]] == [
        *(("tool", "c"), ("tool", "d"), ("system", None))
    ]
    # Two answers next to each other are two messages.
    two = read({"input": [said, said, USER]}).messages
    assert [message.content for message in two] == ["s", "s", USER["content"]]


@pytest.mark.parametrize(
    ("fields", "counted", "words"),
    [
        ({"tools": [{**TOOL, "strict": True}]}, "strict", r"tools\[0\].strict"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "defer_loading", "leave it out"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "take the first"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "multiply"}}, "tool_choice", "say in a message"),
        ({"text": {"format": {"type": "json_object"}}}, "response_format", r"text.format: .*rollout.top_k"),
        ({"text": {"verbosity": "low"}}, "verbosity", "text.verbosity"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort", "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "summary", "reasoning.summary"),
        ({"truncation": "auto"}, "truncation", "nothing is cut"),
        ({"temperature": 0.1}, "temperature", "is not 1"),
    ],
    ids=str,
)
def test_what_is_not_followed_is_named_in_the_words_of_the_request(fields, counted, words):
    (told,) = read(fields).asked.unenforced.items()
    assert told[0] == counted
    assert re.search(words, told[1])
    with pytest.raises(ApiError, match=words):
        read(fields, refuse=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_7"}]}, "input[0].id"),
        ({"input": [{"id": "msg_7"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}, "input[0].call_id"),
        ({"input": [USER, {"role": "assistant", "content": "x"}]}, "input[1].role"),
        ({"input": [USER] * 5000}, "input"),
        ({"instructions": ["x"]}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": 3}, "truncation"),
        ({"store": "no"}, "store"),
        ({"include": "all"}, "include"),
        ({"text": "x"}, "text"),
        ({"reasoning": 3}, "reasoning"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"messages": [USER]}, "messages"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_its_place(fields, param):
    with pytest.raises(ApiError) as caught:
        read(fields)
    assert (caught.value.status, caught.value.params) == (400, [param])
    assert str(caught.value).startswith(param)


def test_all_faults_are_named_at_once():
    with pytest.raises(ApiError) as caught:
        read({"input": [3, {"role": "user"}], "n": 2, "max_output_tokens": 0, "unheard_of": 1, "temperature": "x"})
    expected = {"input[0]", "input[1].content", "n", "max_output_tokens", "unheard_of", "temperature"}
    assert set(caught.value.params) == expected
