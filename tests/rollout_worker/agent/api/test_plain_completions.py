"""Programs that render their own prompts: text or token ids in, tokens out, each recorded where it was sampled."""

import json

import pytest

from slipstream.rollout_worker.agent.api.messages import ApiError
from slipstream.rollout_worker.agent.api.plain import read_plain
from slipstream.rollout_worker.agent.api.request import Reading
from slipstream.rollout_worker.agent.session import MODEL
from tests import kit
from tests.kit.agent import USER, agent_task, client_of
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll

TALKATIVE = scripted(TOKENIZER, lambda text, index: "words and words")
PROMPT = TOKENIZER.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
NEXT = TOKENIZER.encode("<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
CONFIG = kit.config(kit.WORKER, rollout={"max_episode_tokens": 400}, vllm={"max_model_len": 1000})


async def complete(client, prompt, **fields):
    body = {"model": MODEL, "prompt": prompt, "return_token_ids": True, "logprobs": 0, **fields}
    return await client.post(json.dumps(body), "/completions")


async def rolled(agent):
    run = await roll(agent_task(agent), fake(TALKATIVE), config=CONFIG)
    assert run.queue.failures == {}, run.queue.failures
    return run.rollouts


async def test_i4_a_prompt_that_begins_with_a_segment_goes_on_in_it():
    told = []

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            first = (await complete(client, PROMPT)).body["choices"][0]
            after = [*PROMPT, *first["token_ids"], *NEXT]
            second = (await complete(client, after)).body["choices"][0]
            told.append((first, second))
        return 1.0

    rollout = (await rolled(agent))[0]
    (segment,) = rollout.segments
    first, second = told[0]
    assert segment.token_ids.tolist() == [*PROMPT, *first["token_ids"], *NEXT, *second["token_ids"]]
    assert segment.token_ids[segment.loss_mask].tolist() == [*first["token_ids"], *second["token_ids"]]
    logprobs = [*first["logprobs"]["token_logprobs"], *second["logprobs"]["token_logprobs"]]
    assert segment.logprobs[segment.loss_mask].tolist() == pytest.approx(logprobs)
    assert rollout.turns == 2
    assert (first["text"], first["prompt_token_ids"]) == ("words and words", PROMPT)


async def test_one_that_goes_on_from_the_answer_s_last_token_is_one_turn_more():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            first = (await complete(client, PROMPT, max_tokens=1)).body["choices"][0]
            assert first["finish_reason"] == "length"
            assert (await complete(client, [*PROMPT, *first["token_ids"]], max_tokens=1)).status == 200
        return 1.0

    rollout = (await rolled(agent))[0]
    (segment,) = rollout.segments
    assert (segment.sampled_tokens, rollout.turns) == (2, 2)


async def test_another_prompt_or_another_answer_begins_a_segment():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            two = (await complete(client, PROMPT, n=2)).body["choices"]
            assert [choice["index"] for choice in two] == [0, 1]
            assert (await complete(client, PROMPT[1:])).status == 200
            assert (await client.ask([USER])).status == 200
        return 1.0

    rollout = (await rolled(agent))[0]
    assert len(rollout.segments) == 4
    assert sum(segment.sampled_tokens for segment in rollout.segments) == 4 * rollout.segments[0].sampled_tokens


async def test_a_text_is_read_as_vllm_reads_it_and_stops_where_it_is_told():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            text = TOKENIZER.decode(PROMPT)
            answer = (await complete(client, text, stop=[" and"], add_special_tokens=False)).body["choices"][0]
            assert (answer["text"], answer["prompt_token_ids"]) == ("words", PROMPT)
            plain = (await complete(client, [text], return_token_ids=None, logprobs=None)).body
            assert plain["object"] == "text_completion"
            assert (plain["choices"][0]["logprobs"], "token_ids" in plain["choices"][0]) == (None, False)
            assert plain["usage"]["prompt_tokens"] == len(PROMPT)
        return 1.0

    assert len(await rolled(agent)) == 2


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "not empty"),
        ({"prompt": [1, -2]}, "prompt", "token ids"),
        ({"prompt": [[1], [2]]}, "prompt", "one prompt a request"),
        ({"prompt": [1.5]}, "prompt", "token ids"),
        ({"messages": [USER]}, "messages", "/v1/chat/completions"),
        ({"stream": True}, "stream", "/v1/chat/completions"),
        ({"echo": True}, "echo", "leave it out"),
        ({"best_of": 3}, "best_of", "give n alone"),
        ({"logprobs": 5}, "logprobs", "give 0"),
        ({"return_token_ids": "yes"}, "return_token_ids", "true or false"),
        ({"n": 99}, "n", "at most 16"),
        ({"promt": "x"}, "promt", "not known here"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_its_name(fields, param, words):
    with pytest.raises(ApiError, match=words) as caught:
        read_plain({"model": MODEL, "prompt": [1, 2], **fields}, Reading(kit.config().rollout, 1.0, refuse=True))
    assert param in caught.value.params


async def test_ids_that_the_tokenizer_lacks_are_refused_and_the_episode_goes_on():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            wrong = await complete(client, [5, 10**9])
            assert (wrong.status, wrong.error["param"]) == (400, "prompt")
            assert (await complete(client, PROMPT)).status == 200
        return 1.0

    assert len(await rolled(agent)) == 2
