"""The official `openai` client against the endpoint, unchanged."""

import asyncio
import contextlib
import json
import logging

import pytest

from slipstream.rollout_worker import worker
from tests import kit
from tests.kit.agent import MULTIPLY, USER, agent_task, results_of
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, build_tokenizer
from tests.kit.worker import END_OF_TURN, TOKENIZER, accuracy, fake, multiply, roll, task

openai = pytest.importorskip("openai")

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
TWO_CALLS = CALL + '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'


def of(endpoint, **options):
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)


def product_of(call):
    return str(multiply(**json.loads(call.function.arguments)))


async def test_an_agent_as_one_writes_it_is_trained_on_what_was_sampled():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            messages = list(prompt)
            while True:
                reply = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, tools=[MULTIPLY], user="me", temperature=1.0, top_p=1
                )
                message = reply.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return
                for call in message.tool_calls:
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": product_of(call)})

    server = fake()
    run = await roll(agent_task(agent, rewards=[accuracy]), server)
    assert run.queue.failures == {}
    for rollout in run.rollouts:
        (segment,) = rollout.segments
        text = TOKENIZER.decode(segment.token_ids[segment.loss_mask], skip_special_tokens=False)
        assert text == CALL + "<|im_end|>408<|im_end|>"
        assert (rollout.reward, rollout.turns, rollout.tool_calls) == (1.0, 2, 1)
        assert rollout.reward_components == {"accuracy": 1.0}
        assert rollout.finish_reason == "stop"
        assert [m["role"] for m in json.loads(rollout.messages)] == ["user", "assistant", "tool", "assistant"]
    assert run.worker.capacity.free == run.worker.capacity.total


async def test_a_program_that_asks_for_a_distribution_of_its_own_is_trained_on_the_runs_and_its_author_is_told_once():
    strict = {**MULTIPLY, "function": {**MULTIPLY["function"], "strict": True}}

    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            for _ in range(2):
                await client.chat.completions.create(
                    model=endpoint.model, messages=prompt, tools=[strict], temperature=0.1, tool_choice="required"
                )

    server = fake()
    run = await roll(agent_task(agent, rewards=[accuracy]), server)
    assert run.queue.failures == {}
    for rollout in run.rollouts:
        counted = {name: count for name, count in rollout.metrics.items() if "unenforced" in name}
        assert counted == {f"agent/unenforced/{name}": 2.0 for name in ("temperature", "strict", "tool_choice")}
    assert {request["sampling_params"]["temperature"] for request in server.requests} == {1.0}
    told = [notice.text for notice in run.worker.report().notices]
    assert len(told) == 3
    assert all("agent.unenforced = warn" in text for text in told)


async def test_an_answers_form_is_sent_to_the_server_where_the_learner_can_follow_and_refused_where_the_run_says_so():
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    errors = []

    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            try:
                await client.chat.completions.create(model=endpoint.model, messages=prompt, response_format=form)
            except openai.BadRequestError as error:
                errors.append(error.message)
                raise

    server = fake()
    run = await roll(agent_task(agent, rewards=[accuracy]), server, config=kit.config(kit.WORKER, rollout={"top_k": 9}))
    sent = [request["sampling_params"] for request in server.requests]
    assert sent
    assert all(one["structured_outputs"] == {"json": {"type": "object"}} and one["top_k"] == 9 for one in sent)
    assert not errors
    for rollout in run.rollouts:
        (segment,) = rollout.segments
        assert segment.sampling_mask is not None
        assert segment.sampling_mask.counts.tolist() == [2] * segment.sampled_tokens
    await roll(
        agent_task(agent, rewards=[accuracy]), fake(), config=kit.config(kit.WORKER, agent={"unenforced": "refuse"})
    )
    assert all("set rollout.top_k = 64" in text for text in errors)
    assert errors


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "multiply"}}])
async def test_an_answer_is_held_to_a_call_where_the_learner_can_follow(choice):
    other = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model, "messages": prompt, "tools": [MULTIPLY, other]}
            reply = await client.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **ask)
            assert reply.choices[0].finish_reason == "tool_calls"
            with pytest.raises(openai.BadRequestError, match="no tool has this name"):
                await client.chat.completions.create(
                    tool_choice={"type": "function", "function": {"name": "divide"}}, **ask
                )
        return 1.0

    server = fake()
    run = await roll(agent_task(agent), server, config=kit.config(kit.WORKER, rollout={"top_k": 9}))
    assert run.queue.failures == {}, run.queue.failures
    for request in server.requests:
        form = json.loads(request["sampling_params"]["structured_outputs"]["structural_tag"])["format"]
        begins = [tag["begin"] for tag in form["tags"]]
        named = ["multiply", "add"] if choice == "required" else ["multiply"]
        assert begins == [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in named]
        assert form["tags"][0]["content"]["json_schema"] == MULTIPLY["function"]["parameters"]
        assert {tag["end"] for tag in form["tags"]} == {"}\n</tool_call>"}
    for rollout in run.rollouts:
        assert not [name for name in rollout.metrics if "unenforced" in name]
        (segment,) = rollout.segments
        assert segment.sampling_mask is not None


async def test_a_call_that_the_chat_format_cannot_be_held_to_is_not_followed_and_said():
    whole = "{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}"
    assert whole in CHAT_TEMPLATE
    tagged = CHAT_TEMPLATE.replace(
        whole,
        "{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
        "{%- for name, value in call.function.arguments.items() %}"
        "{{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}{%- endfor %}"
        "{{- '</function>\\n</tool_call>' }}",
    )

    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model, "messages": prompt, "tools": [MULTIPLY]}
            await client.chat.completions.create(tool_choice="required", **ask)
        return 1.0

    tokenizer = build_tokenizer(tagged)
    masked = kit.config(kit.WORKER, rollout={"top_k": 9})
    run = await roll(agent_task(agent), fake(), config=masked, tokenizer=tokenizer)
    assert [rollout.metrics["agent/unenforced/tool_choice"] for rollout in run.rollouts] == [1.0, 1.0]
    (notice,) = run.worker.report().notices
    assert "writes no JSON that a call could be held to" in notice.text


def test_the_same_conversation_is_the_same_ids_as_the_native_loops():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            messages = list(prompt)
            for _ in range(2):
                reply = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[MULTIPLY])
                message = reply.choices[0].message.model_dump()
                messages += [message, *results_of(message)]

    async def both():
        return await roll(task(), fake()), await roll(agent_task(agent, rewards=[accuracy]), fake())

    native, ours = asyncio.run(both())
    for one, other in zip(native.rollouts, ours.rollouts, strict=True):
        assert one.segments[0].token_ids.tolist() == other.segments[0].token_ids.tolist()
        assert one.segments[0].loss_mask.tolist() == other.segments[0].loss_mask.tolist()
        assert one.messages == other.messages


async def test_a_plain_function_with_the_sync_client():
    def agent(endpoint, prompt):
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            assert [model.id for model in client.models.list()] == [endpoint.model]
            assert client.models.retrieve(endpoint.model).owned_by == "slipstream"
            reply = client.chat.completions.create(model=endpoint.model, messages=prompt)
            return reply.choices[0].message.content

    run = await roll(agent_task(agent, rewards=[as_text]), fake(scripted(TOKENIZER, in_turn(["408"]))))
    assert [rollout.reward for rollout in run.rollouts] == [1.0, 1.0]
    assert run.rollouts[0].extra == {"agent_result": "408"}


def as_text(completions, agent_results, answer, **columns):
    return [float(result == str(right)) for result, right in zip(agent_results, answer, strict=True)]


async def test_streaming_with_tools_gives_what_a_whole_answer_does():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            stream = await client.chat.completions.create(
                model=endpoint.model,
                messages=prompt,
                tools=[MULTIPLY],
                stream=True,
                stream_options={"include_usage": True},
            )
            calls, text, finish, usage, roles = {}, "", None, None, []
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    text += choice.delta.content or ""
                    roles += [choice.delta.role] if choice.delta.role else []
                    for call in choice.delta.tool_calls or []:
                        found = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                        found["id"] += call.id or ""
                        found["name"] += call.function.name or ""
                        found["arguments"] += call.function.arguments or ""
            assert (finish, text, roles) == ("tool_calls", "So:", ["assistant"])
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            assert usage.completion_tokens == len(TOKENIZER.encode("So: " + TWO_CALLS + "<|im_end|>"))
            assert [json.loads(call["arguments"]) for call in calls.values()] == [{"a": 12, "b": 34}, {"a": 2, "b": 3}]
            said = {
                "role": "assistant",
                "content": text,
                "tool_calls": [
                    {"id": call["id"], "type": "function", "function": {k: call[k] for k in ("name", "arguments")}}
                    for call in calls.values()
                ],
            }
            # The results in another order: each is told by its id, and stands in that of the calls.
            messages = [*prompt, said, *reversed(results_of(said))]
            async with client.chat.completions.stream(
                model=endpoint.model, messages=messages, tools=[MULTIPLY]
            ) as stream:
                final = await stream.get_final_completion()
            return {"reward": 1.0, "last": final.choices[0].message.content}

    server = fake(scripted(TOKENIZER, in_turn(["So: " + TWO_CALLS, "done"])))
    run = await roll(agent_task(agent), server)
    assert run.queue.failures == {}
    for rollout in run.rollouts:
        (segment,) = rollout.segments
        text = TOKENIZER.decode(segment.token_ids, skip_special_tokens=False)
        assert "<tool_response>\n408\n</tool_response>\n<tool_response>\n6\n</tool_response>" in text
        assert (rollout.extra, rollout.tool_calls) == ({"last": "done"}, 2)


async def test_i4_parallel_branches_share_what_they_go_on_from():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            first = await client.chat.completions.create(model=endpoint.model, messages=prompt)
            said = first.choices[0].message

            async def ask(text):
                messages = [*prompt, said, {"role": "user", "content": text}]
                reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
                return reply.choices[0].message.content

            assert await asyncio.gather(ask("left"), ask("right")) == ["left it is", "right it is"]
            return 0.5

    def reply(text, index):
        return next((f"{way} it is" for way in ("left", "right") if way in text), "which way?")

    server = fake(scripted(TOKENIZER, reply))
    run = await roll(agent_task(agent), server)
    encode = lambda text: TOKENIZER.encode(text, add_special_tokens=False)  # noqa: E731
    for rollout in run.rollouts:
        one, other = rollout.segments
        assert rollout.metrics["chat/new_segments"] == 1.0
        shared = encode("<|im_start|>user\nMultiply 12 by 34.<|im_end|>\n<|im_start|>assistant\n")
        which = encode("which way?<|im_end|>")
        first = one.token_ids.tolist()
        assert first[: len(shared) + len(which)] == other.token_ids.tolist()[: len(shared) + len(which)]
        assert first[: len(shared) + len(which)] == shared + which
        trained = [TOKENIZER.decode(of.token_ids[of.loss_mask], skip_special_tokens=False) for of in rollout.segments]
        assert trained[0].startswith("which way?<|im_end|>")
        assert not trained[1].startswith("which way?")
        assert {text.removeprefix("which way?<|im_end|>") for text in trained} == {
            "left it is<|im_end|>",
            "right it is<|im_end|>",
        }
        assert rollout.reward == 0.5
    assert sorted(len(body["token_ids"]) for body in server.requests)[:2] == [len(shared)] * 2


async def test_several_answers_to_one_request_and_their_log_probs():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            reply = await client.chat.completions.create(
                model=endpoint.model, messages=prompt, n=3, logprobs=True, max_completion_tokens=4
            )
            assert [choice.index for choice in reply.choices] == [0, 1, 2]
            for choice in reply.choices:
                assert choice.finish_reason == "length"
                assert len(choice.logprobs.content) == 4
                assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
                assert all(entry.logprob < 0 for entry in choice.logprobs.content)
            return 1.0

    run = await roll(agent_task(agent), fake(scripted(TOKENIZER, lambda text, index: "a long answer of many tokens")))
    assert run.queue.failures == {}
    for rollout in run.rollouts:
        assert (rollout.turns, len(rollout.segments)) == (3, 3)
        assert rollout.finish_reason == "stop", "the agent's own bound is no limit of the run"


async def test_a_stop_text_ends_an_answer_and_is_not_in_it():
    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            ask = {"model": endpoint.model, "stop": ["Observation:"]}
            reply = await client.chat.completions.create(messages=prompt, **ask)
            assert reply.choices[0].message.content == "Thought. "
            messages = [*prompt, reply.choices[0].message, {"role": "user", "content": "Observation: 3"}]
            await client.chat.completions.create(messages=messages, **ask)
            return 1.0

    server = fake(scripted(TOKENIZER, in_turn(["Thought. Observation:", "done"])))
    run = await roll(agent_task(agent), server)
    assert {tuple(body["sampling_params"]["stop"]) for body in server.requests} == {("Observation:",)}
    for rollout in run.rollouts:
        (segment,) = rollout.segments
        assert "Thought. Observation:" in TOKENIZER.decode(segment.token_ids[segment.loss_mask])


async def asked_for_ever(client):
    while True:
        await client.models.list()


async def test_the_key_of_an_episode_that_is_over_is_refused_at_once():
    over = []

    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            await client.chat.completions.create(model=endpoint.model, messages=prompt)
            over.append(endpoint)
            if endpoint is over[0]:
                return 1.0
            client.api_key = over[0].api_key
            with pytest.raises(openai.APIStatusError) as caught:
                await asked_for_ever(client)  # until the first episode has ended
            assert (caught.value.status_code, caught.value.code) == (410, "episode_over")
            client.api_key = "sk-slipstream-guess"
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        return 1.0

    run = await roll(agent_task(agent), fake())
    assert run.queue.failures == {}
    assert [rollout.turns for rollout in run.rollouts] == [1, 1]


async def test_a_limit_is_told_as_openai_tells_it_and_fails_no_episode():
    seen = []

    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            messages = list(prompt)
            try:
                while True:
                    reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
                    messages += [reply.choices[0].message, USER]
            except openai.BadRequestError as error:
                seen.append((error.code, error.param))
                raise

    small = kit.config(kit.WORKER, rollout={"max_turns": 0}, vllm={"max_model_len": 128})
    server = fake(scripted(TOKENIZER, lambda text, index: "words " * 6), max_model_len=128)
    run = await roll(
        agent_task(agent, rewards=[lambda completions, **rest: [1.0] * len(completions)]), server, config=small
    )
    assert run.queue.failures == {}
    assert seen == [("context_length_exceeded", "messages")] * 2
    assert [rollout.finish_reason for rollout in run.rollouts] == ["context"] * 2
    assert all(len(of.token_ids) <= 128 for rollout in run.rollouts for of in rollout.segments)
    assert END_OF_TURN in run.rollouts[0].segments[0].token_ids


async def test_a_client_writes_no_line_for_each_request(caplog):
    """14,198 of a worker's 14,930 lines."""
    loggers = [logging.getLogger(name) for name in worker.CLIENTS]
    levels = [logger.level for logger in loggers]

    async def agent(endpoint, prompt):
        async with of(endpoint) as client:
            await client.chat.completions.create(model=endpoint.model, messages=prompt)
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none", max_retries=1) as nobody:
            with contextlib.suppress(openai.APIConnectionError):
                await nobody.chat.completions.create(model=endpoint.model, messages=prompt)

    caplog.set_level(logging.INFO)
    try:
        worker.quiet_clients()
        run = await roll(agent_task(agent, rewards=[accuracy]), fake())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert run.queue.failures == {}
    ours = ("rollout_worker", "protocol", "aiohttp")  # aiohttp: the stand-in for vLLM
    assert not [record.getMessage() for record in caplog.records if record.name.split(".")[0] not in ours]
