"""I4: whatever an agent asks, every sampled token stands once, and each segment is what vLLM was sent and sampled."""

import asyncio
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.protocol import codec
from slipstream.rollout_queue.ledger import validation
from tests import kit
from tests.kit.agent import MULTIPLY, agent_task, client_of, results_of
from tests.kit.fake_vllm import Fault
from tests.kit.fake_vllm.engine import logprob_of
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll

# A request without an answer in time is sampled again, and its first sample trains nowhere. The tests' usual time-out
# of 5 s passes when the machine stands still for so long; here every sampled turn is counted, so it is a run's.
ROOMY = kit.config(
    kit.WORKER,
    rollout={"max_turns": 0, "max_episode_tokens": 100_000},
    worker={"request_timeout_s": 600.0},
    vllm={"max_model_len": 4000},
)
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'


def unlike(seed):
    """A policy that says something new each time, at times with calls."""
    numbers, rng = itertools.count(), random.Random(seed)

    def reply(text, index):
        return f"word {next(numbers)} " + rng.choice(["", "", CALL, CALL + CALL, "<tool_call>broken</tool_call>"])

    return scripted(TOKENIZER, reply)


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "from": st.integers(0, 6),  # which conversation so far it continues from; 0: none
            "rewritten": st.booleans(),  # with another first message
            "tools": st.booleans(),
            "side_by_side": st.integers(1, 3),
            "n": st.integers(1, 2),
            "max_tokens": st.sampled_from([None, None, 3]),
            "user": st.booleans(),  # a user's message after the tools'
            "reformed": st.booleans(),  # as clients do that normalise
        }
    ),
    min_size=1,
    max_size=7,
)


def reformed(messages):
    """The same, as another client would send it."""
    found = []
    for message in messages:
        message = {**message, "refusal": None, "annotations": []}
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        if calls := message.get("tool_calls"):
            wide = lambda text: text.replace(",", " , ").replace(":", " :  ")  # noqa: E731
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": wide(call["function"]["arguments"])}}
                for call in calls
            ]
        found.append(message)
    return found


def agent_of(steps):
    async def agent(endpoint):
        conversations = []
        async with client_of(endpoint) as client:
            for number, step in enumerate(steps):
                before = (
                    conversations[(step["from"] - 1) % len(conversations)] if step["from"] and conversations else []
                )
                if step["rewritten"] and before:
                    before = [{"role": "user", "content": f"summary {number}"}, *before[1:]]
                messages = [*before, *(results_of(before[-1]) if before else [])]
                if step["user"] or not messages or messages[-1]["role"] == "assistant":
                    messages.append({"role": "user", "content": f"question {number}"})
                if step["reformed"]:
                    messages = reformed(messages)
                fields = {"n": step["n"]}
                if step["tools"]:
                    fields["tools"] = [MULTIPLY]
                if step["max_tokens"]:
                    fields["max_tokens"] = step["max_tokens"]
                replies = await asyncio.gather(*(client.ask(messages, **fields) for _ in range(step["side_by_side"])))
                for reply in replies:
                    assert reply.status == 200, reply.body
                    conversations += [[*messages, choice["message"]] for choice in reply.body["choices"]]
        return 1.0

    return agent


def sampled_of(segment):
    return segment.token_ids[segment.loss_mask]


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, seed=st.integers(0, 9))
def test_i4_every_sampled_token_trains_once_where_it_was_sampled(steps, seed):
    asyncio.run(check(steps, seed))


@pytest.mark.parametrize("lost", [1, 2])
def test_i4_an_answer_that_is_lost_is_sampled_again_and_trains_nowhere(lost):
    """The connections of as many requests break after the server has sampled for them."""
    step = {"from": 0, "rewritten": False, "tools": True, "max_tokens": None, "user": False, "reformed": False}
    steps = [{**step, "side_by_side": 2, "n": 1}, {**step, "side_by_side": 1, "n": 2, "from": 1}]
    asyncio.run(check(steps, 1, lost))


async def at_once(seconds):
    """Sleeps without waiting."""


async def check(steps, seed, lost=0):
    """`lost`: answers that the server sampled, and the worker never got."""
    server = fake(unlike(seed), [Fault("die", times=lost)] if lost else [])
    answers = []
    policy = server.engine.policy

    def kept(token_ids, index):
        sampled = policy(token_ids, index)
        answers.append((token_ids, sampled))
        return sampled

    server.engine.policy = kept
    run = await roll(agent_task(agent_of(steps)), server, config=ROOMY, sleep=at_once)
    (group,) = run.queue.groups
    turns = sum(step["side_by_side"] * step["n"] for step in steps)
    assert [rollout.turns for rollout in group.rollouts] == [turns, turns]
    found = []
    for rollout in group.rollouts:
        for segment in rollout.segments:
            covered = np.zeros(len(segment.token_ids), dtype=bool)
            for span in segment.version_spans:
                assert not covered[span.start : span.end].any()
                covered[span.start : span.end] = True
            assert (covered == segment.loss_mask).all()
            # Each turn in it was sampled after exactly what stands before it.
            for start, end in turns_in(segment):
                ids = segment.token_ids.tolist()
                found.append((tuple(ids[:start]), tuple(ids[start:end])))
                expected = [logprob_of(token, place) for place, token in enumerate(ids[start:end])]
                assert segment.logprobs[start:end].tolist() == pytest.approx(expected)
        assert rollout.metrics.get("chat/new_segments", 0) == len(rollout.segments) - 1
    assert len(found) == 2 * turns
    assert len(answers) == 2 * turns + lost
    left = [(tuple(prompt), tuple(sampled)) for prompt, sampled in answers]
    for prompt, turn in found:
        left.remove(next(each for each in left if each[0] == prompt and each[1][: len(turn)] == turn))
    assert len(left) == lost
    ticket = SimpleNamespace(id=group.ticket_id, index=group.index, worker_id=group.worker_id)
    validation.check_group(validation.decode(codec.encode(group), 2), ticket, validation.Rules(2, 7, 384))


def turns_in(segment):
    """Runs of spans that touch are of one turn: between turns something is shown."""
    places = []
    for span in segment.version_spans:
        if places and places[-1][1] == span.start:
            places[-1][1] = span.end
        else:
            places.append([span.start, span.end])
    return places
