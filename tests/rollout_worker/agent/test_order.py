"""I4 in whatever order answers come: each turn that a request gets stands once, after what it was sampled after."""

import asyncio
import itertools
import json
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.rollout_worker.agent import ChatFormats, Session
from slipstream.rollout_worker.agent.session import AgentContext
from slipstream.rollout_worker.episodes.capacity import Capacity
from slipstream.rollout_worker.episodes.limits import Deadline, EpisodeLimits
from slipstream.rollout_worker.episodes.runner import EpisodeRunner
from slipstream.rollout_worker.inference.engine import Sampled, SampledSpan
from slipstream.rollout_worker.inference.router import Affinity
from tests import kit
from tests.kit.agent import MULTIPLY, results_of
from tests.kit.worker import TOKENIZER, chat_format, until

CONFIG = kit.config(kit.WORKER, rollout={"max_turns": 0, "max_episode_tokens": 100_000}, vllm={"max_model_len": 4000})
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
# What the policy says, in the order in which it is asked.
REPLIES = ["word", "word " + CALL, "the same", "the same", CALL + CALL, "<tool_call>broken</tool_call>"]
# Rounds of the event loop in which an answer that came has long been recorded.
SETTLED = 40


class Policy:
    """Samples by hand. `waiting`: the requests without an answer yet; `given`: prompts and turns of those with one."""

    def __init__(self):
        self.waiting = []
        self.given = []
        self.asked = 0

    async def sample(self, affinity, prompt, max_tokens, pending=None, own=None, known=0, images=()):
        reply = TOKENIZER.encode(REPLIES[self.asked % len(REPLIES)] + "<|im_end|>", add_special_tokens=False)
        self.asked += 1
        ids = reply[:max_tokens]
        spans = [SampledSpan(7, 0, len(ids), "vllm-0")]
        turn = Sampled(ids, [-0.5] * len(ids), spans, "stop" if len(ids) == len(reply) else "length")
        waiting = (tuple(prompt), turn, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        try:
            return await waiting[2]
        finally:
            if waiting in self.waiting:
                self.waiting.remove(waiting)

    def answer(self, index):
        """Answer the request of this place among those that wait."""
        prompt, turn, future = self.waiting.pop(index % len(self.waiting))
        self.given.append((prompt, tuple(turn.token_ids)))
        future.set_result(turn)


class Agent:
    """Asks one session; `conversations`: all that it got, with what it had sent."""

    def __init__(self, formats):
        self.policy = Policy()
        episodes = EpisodeRunner(self.policy, EpisodeLimits.of(CONFIG), 60.0, Capacity(64, 64, time.monotonic))
        self.session = Session(AgentContext(formats, episodes, CONFIG.rollout), Affinity(), 1.0, Deadline(60.0))
        self.conversations = []
        self.turns = 0

    async def ask(self, step):
        """One request. Raises `asyncio.CancelledError` if its client goes away."""
        place = step["from"]
        before = self.conversations[(place - 1) % len(self.conversations)] if place and self.conversations else []
        messages = [*before, *(results_of(before[-1]) if before else [])]
        if not messages or messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": f"question {place}"})
        body = {"model": "policy", "messages": messages, "n": step["n"]}
        if step["tools"]:
            body["tools"] = [MULTIPLY]
        if step["max_tokens"]:
            body["max_tokens"] = step["max_tokens"]
        completion = await self.session.answer(json.dumps(body).encode())
        choices = json.loads(completion.whole())["choices"]
        self.turns += len(choices)
        self.conversations += [[*messages, choice["message"]] for choice in choices]

    def check(self, lost=0):
        """Every turn that was given stands once, after its prompt, but for `lost` ones that no request got."""
        episode = self.session.episode("stop", 1.0)
        found = [
            (tuple(draft.ids[: span.start]), tuple(draft.ids[span.start : span.end]))
            for draft in episode.drafts
            for span in draft.spans
        ]
        assert episode.rollout.turns == self.turns == len(found) == len(self.policy.given) - lost
        assert Counter(found) <= Counter(self.policy.given)
        for draft in episode.drafts:
            sampled = {place for span in draft.spans for place in range(span.start, span.end)}
            assert [place for place, mask in enumerate(draft.mask) if mask] == sorted(sampled)


def step(side_by_side=1, n=1, tools=False, max_tokens=None, place=0):
    return {"side_by_side": side_by_side, "n": n, "tools": tools, "max_tokens": max_tokens, "from": place}


STEPS = [step(2, tools=True), step(2, max_tokens=3), step(n=2), step(2, n=2, tools=True, place=2)]


def orders():
    return itertools.product(*(itertools.permutations(range(each["side_by_side"] * each["n"])) for each in STEPS))


@pytest.mark.parametrize("rounds", [0, SETTLED])
async def test_i4_no_turn_vanishes_in_any_order_of_answers(rounds):
    """All orders of each step, with answers that come at once, and one after another."""
    formats = ChatFormats(chat_format(), chat_format)
    for order in orders():
        agent = Agent(formats)
        for each, places in zip(STEPS, order, strict=True):
            asked = [asyncio.create_task(agent.ask(each)) for _ in range(each["side_by_side"])]
            await until(lambda: len(agent.policy.waiting) == len(places))  # noqa: B023
            waiting = list(agent.policy.waiting)
            for place in places:
                agent.policy.answer(agent.policy.waiting.index(waiting[place]))
                await settled(rounds)
            await asyncio.gather(*asked)
        assert agent.turns == 10
        agent.check()


ACTIONS = st.lists(
    st.one_of(
        st.builds(
            step,
            side_by_side=st.integers(1, 3),
            n=st.integers(1, 2),
            tools=st.booleans(),
            max_tokens=st.sampled_from([None, None, 3]),
            place=st.integers(0, 6),
        ),
        st.integers(0, 9).map(lambda index: ("answer", index)),
        st.integers(0, 9).map(lambda index: ("answer", index)),
        st.integers(0, 9).map(lambda index: ("leave", index)),
    ),
    max_size=40,
)


@settings(max_examples=100)
@given(actions=ACTIONS)
def test_i4_no_turn_vanishes_when_requests_come_and_go_between_answers(actions):
    asyncio.run(interleaved(actions))


async def interleaved(actions):
    """Requests begin, and their clients go away, while others wait for their answers."""
    agent, asked = Agent(ChatFormats(chat_format(), chat_format)), []
    for action in actions:
        running = [task for task in asked if not task.done()]
        if isinstance(action, dict):
            before = agent.policy.asked
            asked += [asyncio.create_task(agent.ask(action)) for _ in range(action["side_by_side"])]
            wanted = before + action["side_by_side"] * action["n"]
            await until(lambda: agent.policy.asked == wanted)  # noqa: B023
        elif action[0] == "answer" and agent.policy.waiting:
            agent.policy.answer(action[1])
            await settled()
        elif action[0] == "leave" and running:
            running[action[1] % len(running)].cancel()
            await settled()
    while agent.policy.waiting:
        agent.policy.answer(0)
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends), ends
    agent.check(lost=len(agent.policy.given) - agent.turns)


async def settled(rounds=SETTLED):
    for _ in range(rounds):
        await asyncio.sleep(0)
