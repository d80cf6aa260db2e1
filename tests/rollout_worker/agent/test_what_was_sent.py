"""I4: the policy answers the prompt that its agent sent, to the letter, and no other's."""

import itertools

import pytest

from slipstream.rollout_worker.chat.template import TemplateFormat
from tests import kit
from tests.kit.agent import MULTIPLY, USER, agent_task, client_of
from tests.kit.fake_vllm.policies import scripted
from tests.kit.fake_vllm.tokenizer import THINKING_TEMPLATE, build_tokenizer
from tests.kit.worker import fake, roll

TOKENIZER = build_tokenizer(THINKING_TEMPLATE)
ROOMY = kit.config(kit.WORKER, rollout={"max_episode_tokens": 2000}, vllm={"max_model_len": 2000})
FOLLOW = {"role": "user", "content": "Why?"}
TOOLS = [MULTIPLY]  # only with tools is reasoning told from content


def chat(schemas):
    return TemplateFormat(TOKENIZER, [TOKENIZER.eos_token_id], schemas, "a model that thinks")


def thinking(text, index):
    """New reasoning each time, and always the same answer."""
    return f"<think>thought {next(thinking.numbers)}</think>so"


async def rolled(agent, reply=thinking, **options):
    thinking.numbers = itertools.count()
    run = await roll(agent_task(agent), fake(scripted(TOKENIZER, reply)), tokenizer=TOKENIZER, config=ROOMY, **options)
    assert run.queue.failures == {}, run.queue.failures
    return run


def texts_of(rollout):
    return [TOKENIZER.decode(segment.token_ids) for segment in rollout.segments]


def thought_in(text):
    """The first."""
    return text.partition("<think>")[2].partition("</think>")[0]


@pytest.mark.parametrize(
    "shot",
    [
        lambda number: {"content": "4", "reasoning_content": f"shot {number}"},
        lambda number: {"content": " " * number + "4"},
        lambda number: {"content": "4" + "\n" * number},
    ],
)
async def test_no_episode_is_sampled_after_the_prompt_of_another(shot):
    numbers = itertools.count()

    async def agent(endpoint, prompt):
        number = next(numbers)
        async with client_of(endpoint) as client:
            await client.ask([USER, {"role": "assistant", **shot(number)}, *prompt])
        return float(number)

    run = await rolled(agent, tickets=2)
    assert len(run.rollouts) == 4
    for rollout in run.rollouts:
        (text,) = texts_of(rollout)
        sent = {"role": "assistant", **shot(int(rollout.reward))}
        expected = await chat([]).render_ids([USER, sent, USER], generation_prompt=True)
        assert text.startswith(TOKENIZER.decode(expected)), text


@pytest.mark.parametrize(
    "changes",
    [{"reasoning_content": "another"}, {"reasoning_content": ""}, {"content": " so"}, {"content": "so\n"}],
)
async def test_an_answer_that_the_agent_changed_is_read_by_the_policy_as_it_was_sent(changes):
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            changed = {**(await client.ask(tools=TOOLS)).message, **changes}
            assert (await client.ask([USER, changed, FOLLOW], tools=TOOLS)).status == 200
        return 1.0

    run = await rolled(agent)
    for rollout in run.rollouts:
        _, sent = rollout.segments
        first, second = texts_of(rollout)
        assert "<think>thought " in first
        said = {"reasoning_content": thought_in(first), "content": "so"}
        expected = await chat(TOOLS).render_ids(
            [USER, {"role": "assistant", **said, **changes}, FOLLOW], generation_prompt=True
        )
        assert second.startswith(TOKENIZER.decode(expected))
        assert sent.token_ids[: len(expected)].tolist() == expected


@pytest.mark.parametrize("dropped", ["never", "always", "later"])
async def test_an_answer_is_known_again_whether_or_not_the_client_sends_its_reasoning(dropped):
    async def agent(endpoint):
        messages = [USER]
        async with client_of(endpoint) as client:
            for turn in range(3):
                sent = [
                    {k: v for k, v in message.items() if k != "reasoning_content"}
                    if dropped == "always" or (dropped == "later" and place < 2 * turn - 1)
                    else message
                    for place, message in enumerate(messages)
                ]
                messages += [(await client.ask(sent, tools=TOOLS)).message, FOLLOW]
        return 1.0

    run = await rolled(agent)
    for rollout in run.rollouts:
        (text,) = texts_of(rollout)
        assert text.count("<think>thought ") == 3


async def test_of_answers_that_differ_in_reasoning_alone_it_goes_on_from_the_one_that_was_sent():
    async def agent(endpoint):
        async with client_of(endpoint) as client:
            reply = await client.ask(n=2, tools=TOOLS)
            one, other = (choice["message"] for choice in reply.body["choices"])
            assert one["reasoning_content"] != other["reasoning_content"]
            last = (await client.ask([USER, one, FOLLOW], tools=TOOLS)).message
            await client.ask([USER, other, FOLLOW, last, FOLLOW], tools=TOOLS)
        return 1.0

    run = await rolled(agent)
    for rollout in run.rollouts:
        one, other, last = texts_of(rollout)
        assert (one.count("<think>"), other.count("<think>"), last.count("<think>")) == (2, 1, 3)
        assert thought_in(other) in last
        assert thought_in(one) not in last, "the last answer stood behind the first one then, and does not now"
