"""One segment for a plain tool loop, whatever a client does to it; and why a rollout has more where it has."""

import pytest

from slipstream.rollout_worker.agent import segments
from tests import kit
from tests.kit.agent import MULTIPLY, USER, agent_task, client_of, results_of
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.worker import TOKENIZER, fake, roll

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
CONFIG = kit.config(kit.WORKER, rollout={"max_episode_tokens": 2000}, vllm={"max_model_len": 2000})
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [MULTIPLY]


def by_id(ids):
    """Return a client that names calls again."""

    def rewritten(message, results):
        calls = [{**call, "id": ids(place)} for place, call in enumerate(message["tool_calls"])]
        return {**message, "tool_calls": calls}, [
            {**result, "tool_call_id": ids(place)} for place, result in enumerate(results)
        ]

    return rewritten


def with_arguments(text):
    def rewritten(message, results):
        calls = [{**call, "function": {"name": "multiply", "arguments": text}} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}, results

    return rewritten


CLIENTS = {
    "as it is": lambda message, results: (message, results),
    "ids of its own": by_id("toolu_{}".format),
    "the same ids in each turn": by_id("{}".format),
    "white space and order of keys": with_arguments('{ "b" : 34,\n"a":12 }'),
    "numbers with a point": with_arguments('{"a": 12.0, "b": 34.0}'),
    "without the text": lambda message, results: ({**message, "content": None}, results),
    "stripped": lambda message, results: ({**message, "content": message["content"].strip()}, results),
}


async def rolled(agent, *replies):
    run = await roll(agent_task(agent), fake(scripted(TOKENIZER, in_turn(replies))), config=CONFIG)
    assert run.queue.failures == {}, run.queue.failures
    return run


@pytest.mark.parametrize("client_does", CLIENTS.values(), ids=CLIENTS)
async def test_i4_a_plain_tool_loop_is_one_segment(client_does):
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            messages = [USER]
            while (message := (await client.ask(messages, tools=TOOLS)).message).get("tool_calls"):
                assert all(call["id"].startswith("call_") for call in message["tool_calls"])
                said, results = client_does(message, results_of(message))
                messages += [said, *results]
        return 1.0

    run = await rolled(agent, f"So: {CALL}", f"And: {CALL}", "done")
    for rollout in run.rollouts:
        (segment,) = rollout.segments
        text = TOKENIZER.decode(segment.token_ids[segment.loss_mask], skip_special_tokens=False)
        assert text == f"So: {CALL}<|im_end|>And: {CALL}<|im_end|>done<|im_end|>"
        assert TOKENIZER.decode(segment.token_ids).count("<tool_response>\n408\n</tool_response>") == 2
        assert "segments" not in rollout.extra
    assert not run.worker.report().notices


async def test_i4_of_answers_that_read_the_same_the_one_with_the_ids_is_gone_on_from():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            choices = (await client.ask(tools=TOOLS, n=2)).body["choices"]
            first, second = (choice["message"] for choice in choices)
            await client.ask([USER, second, *results_of(second)], tools=TOOLS)
            await client.ask([USER, first, *results_of(first)], tools=TOOLS)
        return 1.0

    run = await rolled(agent, CALL, "done")
    assert [len(rollout.segments) for rollout in run.rollouts] == [2, 2]
    assert run.rollouts[0].extra["segments"] == "2, of which 1 x another request had gone on from the same answer"


def another_system(message):
    return [{**SYSTEM, "content": "Be long."}, USER, message, *results_of(message)], TOOLS


def fewer_tools(message):
    return [SYSTEM, USER, message, *results_of(message)], []


def changed_answer(message):
    return [SYSTEM, USER, {**message, "content": "No:"}, *results_of(message)], TOOLS


def changed_question(message):
    return [SYSTEM, {**USER, "content": "Multiply."}, message, *results_of(message)], TOOLS


def without_the_question(message):
    return [SYSTEM, message, *results_of(message)], TOOLS


def other_conversation(message):
    return [{"role": "user", "content": "Judge."}], TOOLS


def few_shot(message):
    shot = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    return [*shot, {"role": "user", "content": "3?"}], TOOLS


def reasoned(message):
    return [SYSTEM, USER, {**message, "reasoning_content": "I guess."}, *results_of(message)], TOOLS


def same_again(message):
    return [SYSTEM, USER, message, *results_of(message)], TOOLS


@pytest.mark.parametrize(
    ("then", "reason", "words"),
    [
        (another_system, "system", "the system message was changed: message 0 was system: 'Be brief.'"),
        (fewer_tools, "tools", "the tools were changed"),
        (changed_answer, "answer", "came back changed: message 2 was assistant: 'So: multiply({"),
        (reasoned, "answer", "after no reasoning and is assistant: 'So: multiply({"),
        (changed_question, "history", "message 1 was user: 'Multiply 12 by 34.' and is user: 'Multiply.'"),
        (without_the_question, "history", "message 1 was user: 'Multiply 12 by 34.' and is assistant"),
        (other_conversation, "conversation", "its own conversation"),
        (few_shot, "conversation", "its own conversation"),
        (same_again, "branch", "another request had gone on from the same answer"),
    ],
)
async def test_a_rollout_says_how_many_segments_it_has_and_why(then, reason, words):
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            message = (await client.ask([SYSTEM, USER], tools=TOOLS)).message
            await client.ask([SYSTEM, USER, message, *results_of(message)], tools=TOOLS)
            messages, tools = then(message)
            reply = await client.ask(messages, **({"tools": tools} if tools else {}))
            assert reply.status == 200, reply.body
        return 1.0

    run = await rolled(agent, f"So: {CALL}", "done")
    for rollout in run.rollouts:
        assert len(rollout.segments) == 2
        assert rollout.metrics["chat/new_segments"] == 1.0
        assert {name: value for name, value in rollout.metrics.items() if "agent/" in name} == {
            f"agent/new_segments/{reason}": 1.0
        }
        assert rollout.extra["segments"].startswith("2, of which 1 x ")
        assert words in rollout.extra["segments"]
    told = [notice.text for notice in run.worker.report().notices]
    if reason in ("conversation", "branch"):
        assert told == []
    else:
        (text,) = told
        assert words in text


async def test_i9_why_a_segment_is_new_is_found_without_comparing_each_answer_with_each(monkeypatch):
    """A thousand of each took 3 s, in which the loop of the worker stood still."""
    made = []
    digest = segments.chained_answer
    monkeypatch.setattr(segments, "chained_answer", lambda *given: made.append(given) or digest(*given))

    def shots(name):
        return [USER, *({"role": "assistant", "content": f"{name}{number}"} for number in range(60)), USER]

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            for name in "xy":
                asked = [{**message, "content": name + message["content"]} for message in shots(name)]
                assert (await client.ask(asked)).status == 200
        return 1.0

    run = await roll(agent_task(agent), fake(scripted(TOKENIZER, lambda text, index: "so")), config=CONFIG)
    assert [len(rollout.segments) for rollout in run.rollouts] == [2, 2]
    assert 0 < len(made) < 1000
