"""What a request may ask: honoured, passed, or refused by name, all of it at once."""

from dataclasses import replace

import pytest

from slipstream.rollout_worker.agent.api import request
from slipstream.rollout_worker.agent.api.chat import ChatApi
from slipstream.rollout_worker.agent.api.messages import (
    ApiError,
    Call,
    ChatMessage,
    chained,
    chained_answer,
    repeats,
)
from slipstream.rollout_worker.agent.api.request import Reading
from tests import kit
from tests.kit.agent import MULTIPLY, USER

ROLLOUT = kit.config(rollout={"temperature": 0.7}).rollout
CALL = {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 1, "b": 2}'}}


def read(rollout=ROLLOUT, refuse=False, temperature_of_episode=0.7, **fields):
    reading = Reading(rollout, temperature_of_episode, refuse)
    return ChatApi().read({"model": "policy", "messages": [USER], **fields}, reading).asked


def read_messages(messages):
    return ChatApi().read({"model": "policy", "messages": messages}, Reading(ROLLOUT, 0.7)).messages


def refusal(**fields):
    with pytest.raises(ApiError) as caught:
        read(refuse=True, **fields)
    return caught.value


STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "counted", "words"),
    [
        ({"temperature": 0.2}, "temperature", "0.2 is not 0.7"),
        ({"top_p": 0.5}, "top_p", "rollout.top_p"),
        ({"frequency_penalty": 1}, "frequency_penalty", "rollout.frequency_penalty"),
        ({"seed": 1}, "seed", "sampled alike"),
        ({"tools": [MULTIPLY], "parallel_tool_calls": False}, "parallel_tool_calls", "take the first"),
        ({"tools": [STRICT]}, "strict", "check them in the agent"),
        ({"tool_choice": "required"}, "tool_choice", "required: the policy is not made to call"),
        (
            {"tools": [MULTIPLY], "tool_choice": {"type": "function", "function": {"name": "multiply"}}},
            "tool_choice",
            "set rollout.top_k = 64 in the run file, and it is",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", "set rollout.top_k = 64"),
        ({"response_format": FORM}, "response_format", "set rollout.top_k = 64"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
        ({"verbosity": "low"}, "verbosity", "say in a message"),
    ],
    ids=str,
)
def test_what_is_not_followed_is_named_and_goes_on_unless_the_run_refuses_it(fields, counted, words):
    (told,) = read(**fields).unenforced.items()
    assert told[0] == counted
    assert words in told[1]
    with pytest.raises(ApiError, match=r"not|leave it out|say in a message") as caught:
        read(refuse=True, **fields)
    assert caught.value.status == 400
    assert read(temperature=0.7, seed=None).unenforced == {}


def test_with_sampling_masks_an_answer_is_held_to_its_form():
    masked = kit.config(rollout={"temperature": 0.7, "top_k": 64}).rollout
    asked = read(rollout=masked, refuse=True, response_format=FORM)
    assert (asked.form.json, asked.unenforced) == (SCHEMA, {})
    assert read(rollout=masked, response_format={"type": "json_object"}).form.json_object is True
    for wrong in ({"type": "json_schema"}, {"type": "grammar"}, "json", {"type": "json_schema", "json_schema": 3}):
        with pytest.raises(ApiError, match="give text, json_object, or json_schema with a schema"):
            read(rollout=masked, response_format=wrong)


def test_what_is_honoured():
    asked = read(tools=[MULTIPLY], max_tokens=9, max_completion_tokens=7, stop="END", n=2, logprobs=True, stream=True)
    assert asked.tools == [MULTIPLY]
    assert (asked.max_tokens, asked.stop, asked.n, asked.logprobs, asked.stream) == (7, ("END",), 2, True, True)
    assert read(stream=True, stream_options={"include_usage": True}).usage
    assert read(tools=[MULTIPLY], tool_choice="none").tools == []


@pytest.mark.parametrize(
    "fields",
    [
        *({name: "anything"} for name in sorted(request.HARMLESS_PARAMETERS)),
        *({name: None} for name in ("temperature", "seed", "stop", "tools", "unheard_of", "max_tokens")),
        {"temperature": 0.7, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0.0, "frequency_penalty": 0},
        {"response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": {}, "top_logprobs": 0},
        {"parallel_tool_calls": True, "tool_choice": "auto"},
        {"parallel_tool_calls": False},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": False}}]},
    ],
    ids=str,
)
def test_what_passes(fields):
    assert read(refuse=True, **fields).unenforced == {}


@pytest.mark.parametrize("refuse", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        *({"tool_choice": value} for value in (True, 0, "", "any", [], {}, {"type": 3}, [{"type": "function"}])),
        *({"parallel_tool_calls": value} for value in (0, "false", [], {})),
        {"parallel_tool_calls": 0, "tools": [MULTIPLY]},
        {"temperature": "hot"},
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_whatever_is_done_with_what_is_not_followed(fields, refuse):
    with pytest.raises(ApiError) as caught:
        read(refuse=refuse, **fields)
    assert caught.value.params == [next(iter(fields))]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 0.2}, "temperature", r"0\.2 is not 0\.7, which this episode is sampled at \(rollout\.temp"),
        ({"temperature": True}, "temperature", "is not 0.7"),
        ({"top_p": 0.5}, "top_p", "log-probs mean"),
        ({"frequency_penalty": 1}, "frequency_penalty", "rollout.frequency_penalty"),
        ({"seed": 1}, "seed", "leave it out"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "log-probs"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object.*held to a form"),
        ({"response_format": "json"}, "response_format", "give text, json_object"),
        ({"tool_choice": "required"}, "tool_choice", "required: the policy is not made to call"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no tool has this name"),
        ({"tools": [MULTIPLY], "parallel_tool_calls": False}, "parallel_tool_calls", "take the first"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "logprobs alone"),
        ({"functions": []}, "functions", "give tools"),
        ({"modalities": ["text", "audio"]}, "modalities", "text alone"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "chat_template_kwargs"),
        ({"max_tokns": 3}, "max_tokns", "did you mean max_tokens?"),
        ({"zzz": 3}, "zzz", "not known here; leave it out"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "whole number"),
        ({"n": 1000}, "n", "at most 16"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": [3]}, "stop", "give a text"),
        ({"stop": ""}, "stop", "stop: an empty text; give a text"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [USER] * 5000}, "messages", "at most 4096"),
        ({"tools": 3}, "tools", "a list"),
        ({"tools": [MULTIPLY] * 200}, "tools", "at most 128"),
        ({"tools": [MULTIPLY, MULTIPLY]}, "tools[1].function.name", "two tools are named 'multiply'"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]", "type function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
            "give false",
        ),
    ],
    ids=str,
)
def test_what_is_refused(fields, param, words):
    error = refusal(**fields)
    assert (error.status, error.params[0]) == (400, param)
    with pytest.raises(ApiError, match=words):
        raise error


def test_an_evaluations_own_temperature_is_named_with_what_is_right_in_both():
    with pytest.raises(
        ApiError, match=r"0\.7 is not 0\.5, .*\(eval\.temperature\).*give endpoint\.temperature"
    ) as caught:
        read(refuse=True, temperature_of_episode=0.5, temperature=0.7, top_p=0.3)
    assert "rollout.temperature" not in str(caught.value)
    assert "(rollout.top_p)" in str(caught.value)


def test_all_that_is_wrong_is_told_at_once():
    error = refusal(temperature=0.1, seed=3, response_format={"type": "json_object"}, stop=7)
    assert set(error.params) == {"temperature", "seed", "response_format", "stop"}
    assert set(error.body["error"]) == {"message", "type", "param", "code", "params"}
    assert error.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [3, [3], [{"type": "image_url"}], None])
def test_a_content_that_is_no_text_is_named_once(content):
    with pytest.raises(ApiError) as caught:
        read_messages([{"role": "user", "content": content}])
    (param,) = caught.value.params
    assert param.startswith("messages[0].content")


@pytest.mark.parametrize("model", ["gpt-5", 3, None, ["policy"]])
def test_another_model_is_not_found(model):
    error = refusal(model=model)
    assert (error.status, error.code) == (404, "model_not_found")


def said(*messages, chain=chained):
    digest = b""
    for each in read_messages([*messages, USER]):
        digest = chain(digest, each)
    return digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "x"}),
        (
            {"role": "assistant", "content": "hi", "tool_calls": None},
            {"role": "assistant", "content": "hi", "refusal": None},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "audio": None, "tool_calls": [{**CALL, "index": 0}]},
        ),
        (
            {"role": "assistant", "content": "so", "reasoning_content": "why"},
            {"role": "assistant", "content": "so", "reasoning_content": None, "reasoning": "why"},
        ),
    ],
)
def test_messages_that_say_the_same_are_one(one, other):
    assert said(one) == said(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"role": "assistant", "tool_calls": [CALL]},
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "multiply", "arguments": '{"b":2,"a":1}'}}],
            },
        ),
        ({"role": "assistant", "content": "so", "reasoning_content": "why"}, {"role": "assistant", "content": "so"}),
        ({"role": "assistant", "content": " hi\n"}, {"role": "assistant", "content": "hi"}),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [{**CALL, "id": "c2"}]}),
        ({"role": "assistant", "tool_calls": [CALL], "content": "So:"}, {"role": "assistant", "tool_calls": [CALL]}),
        (
            {"role": "assistant", "tool_calls": [CALL]},
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "multiply", "arguments": '{"a": 1.0, "b": 2.0}'}}],
            },
        ),
    ],
)
def test_what_clients_do_to_an_answer_is_known_again_and_is_another_message_anywhere_else(one, other):
    assert said(one, chain=chained_answer) == said(other, chain=chained_answer)
    assert said(one) != said(other)


@pytest.mark.parametrize(
    ("message", "is_the_answer"),
    [
        (ChatMessage("assistant", "So: \n", reasoning="why"), True),
        (ChatMessage("assistant", "So:"), True),
        (ChatMessage("assistant", " So: \n"), False),
        (ChatMessage("assistant", None), True),
        (ChatMessage("assistant", "So!"), False),
        (ChatMessage("assistant", "So:", reasoning="because"), False),
    ],
)
def test_a_text_beside_calls_and_reasoning_are_given_back_or_left_out(message, is_the_answer):
    calls = (Call("c1", "multiply", "{}"),)
    answer = ChatMessage("assistant", "So: \n", calls, reasoning="why")
    assert repeats(replace(message, calls=calls), answer) is is_the_answer
    alone = replace(answer, calls=())
    assert repeats(message, alone) is (is_the_answer and message.content is not None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi "}),
        ({"role": "user", "content": "hi"}, {"role": "system", "content": "hi"}),
        ({"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "ho"}),
        ({"role": "assistant", "content": " hi\n"}, {"role": "assistant", "content": "hi"}),
        (
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "assistant", "tool_calls": [{**CALL, "id": "c2"}]},
        ),
        (
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "multiply", "arguments": "{}"}}]},
        ),
    ],
)
def test_messages_that_say_something_else_are_not(one, other):
    assert said(one) != said(other)


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (["hi"], "messages[0]", "no message"),
        ([{"role": "narrator", "content": "hi"}], "messages[0].role", "give one of system"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role", "give one of system"),
        ([{"role": "user"}], "messages[0].content", "has text"),
        ([{"role": "user", "content": 3}], "messages[0].content", "give text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            "messages[0].content[0]",
            "image_url.*reads text alone",
        ),
        ([{"role": "user", "content": [None]}], "messages[0].content[0]", "text alone"),
        ([{"role": "assistant", "tool_calls": "x"}, USER], "messages[0].tool_calls", "list of calls"),
        ([{"role": "assistant", "tool_calls": [{"id": 3}]}, USER], "messages[0].tool_calls[0]", "all of them text"),
        ([{"role": "assistant", "audio": {"id": "x"}}, USER], "messages[0].audio", "leave it out"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", "give the id"),
        ([USER, {"role": "tool", "content": "x", "tool_call_id": "c9"}], "messages[1].tool_call_id", "no message"),
        ([USER, {"role": "assistant", "content": "So"}], "messages[1].role", "never continued"),
    ],
    ids=str,
)
def test_messages_that_cannot_be_read(messages, param, words):
    with pytest.raises(ApiError, match=words) as caught:
        read_messages(messages)
    assert (caught.value.status, caught.value.params[0]) == (400, param)
