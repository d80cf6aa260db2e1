"""Episodes on a scripted sampler: what is asked for, what is kept, and how they end."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.budget import Limits
from rollout_worker.episode import EpisodeRunner
from rollout_worker.inference.errors import EpisodeFailed
from rollout_worker.inference.pool import Affinity
from rollout_worker.inference.wire import Sampled, SampledSpan
from rollout_worker.task.tools import ToolBox
from tests.kit.worker import END_OF_TURN, TOKENIZER, chat_format, multiply

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
MALFORMED = "<tool_call>multiply(2, 3)</tool_call>"
PROMPT = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)
ROOMY = Limits(max_turn_tokens=1000, max_episode_tokens=1000, max_model_len=4000, max_turns=8)
TOOLS = ToolBox([multiply])
CHAT = chat_format(TOOLS.schemas)


def letter_by_letter(text):
    """Ids of `text` as a policy may well sample them and no tokenizer would make them."""
    ids = [token for letter in text for token in TOKENIZER.encode(letter, add_special_tokens=False)]
    return [*ids, END_OF_TURN]


class ScriptedSampler:
    """Samples the given turns one after the other, cut to what is asked for. An exception in the script is raised."""

    def __init__(self, *turns):
        self.pool = self
        self.turns = list(turns)
        self.requests = []
        self.sampled = []
        self.released = 0

    def release(self, affinities):
        self.released += len(affinities)

    async def sample(self, affinity, prompt, max_tokens, pending=None):
        self.requests.append((list(prompt), max_tokens))
        turn = self.turns[min(len(self.requests), len(self.turns)) - 1]
        if isinstance(turn, Exception):
            raise turn
        if turn is None:
            await asyncio.Event().wait()
        ids = turn if isinstance(turn, list) else letter_by_letter(turn)
        kept = ids[:max_tokens]
        self.sampled.append(kept)
        version = len(self.requests)
        return Sampled(
            token_ids=kept,
            logprobs=[-version - place / 1000 for place in range(len(kept))],
            spans=[SampledSpan(version, 0, len(kept), "ab"[version % 2])],
            finish_reason="stop" if kept == ids else "length",
        )


async def play(*turns, limits=ROOMY, chat=CHAT, tools=TOOLS, timeout_s=30.0):
    sampler = ScriptedSampler(*turns)
    runner = EpisodeRunner(sampler, limits, timeout_s)
    return await runner.run(list(PROMPT), chat, tools, Affinity(), None), sampler


async def test_i4_f18_each_request_is_the_last_one_its_sample_and_the_tools_answer():
    episode, sampler = await play(CALL, MALFORMED, "6")
    assert episode.rollout.turns == 3
    assert sampler.requests[0][0] == PROMPT
    for number, (ids, _) in enumerate(sampler.requests[1:]):
        so_far = sampler.requests[number][0] + sampler.sampled[number]
        assert ids[: len(so_far)] == so_far
        suffix = TOKENIZER.decode(ids[len(so_far) :], skip_special_tokens=False)
        assert suffix.startswith("\n<|im_start|>user\n<tool_response>\n")
        assert suffix.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert episode.ids == sampler.requests[-1][0] + sampler.sampled[-1]


async def test_i4_what_is_trained_is_what_was_sampled():
    episode, sampler = await play(CALL, CALL, "6")
    segment = episode.segment(["b", "a"])
    sampled = [token for turn in sampler.sampled for token in turn]
    assert segment.token_ids[segment.loss_mask].tolist() == sampled
    assert segment.token_versions()[segment.loss_mask].tolist() == [
        number for number, turn in enumerate(sampler.sampled, start=1) for _ in turn
    ]
    assert [span.server for span in segment.version_spans] == [0, 1, 0]
    expected = [-number - place / 1000 for number, turn in enumerate(sampler.sampled, 1) for place in range(len(turn))]
    np.testing.assert_allclose(segment.logprobs[segment.loss_mask], expected, rtol=1e-6)
    assert not segment.logprobs[~segment.loss_mask].any()
    assert sum(span.end - span.start for span in segment.version_spans) == len(sampled) == episode.sampled_tokens


async def test_messages_are_those_that_the_policy_saw():
    episode, _ = await play(CALL, "The product is 6.")
    assert episode.messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}],
        },
        {"role": "tool", "name": "multiply", "content": "6"},
        {"role": "assistant", "content": "The product is 6."},
    ]
    rollout = episode.rollout
    assert (rollout.finish_reason, rollout.tool_calls, rollout.tool_failures) == ("stop", 1, 0)


async def test_a_malformed_call_is_answered_and_counted_and_the_episode_goes_on():
    episode, _ = await play(MALFORMED, "6")
    rollout = episode.rollout
    assert (rollout.turns, rollout.tool_calls, rollout.tool_failures) == (2, 1, 1)
    assert "not valid JSON" in json.loads(episode.messages[1]["content"])["error"]
    assert rollout.finish_reason == "stop"


class NoSuffix:
    """A format that can say of no turn what follows it."""

    parse = staticmethod(CHAT.parse)

    async def suffix_ids(self, prompt_ids, turn_ids, messages):
        self.asked = (prompt_ids, turn_ids, messages)


async def test_an_episode_whose_format_cannot_go_on_ends_with_what_the_policy_saw():
    chat = NoSuffix()
    episode, sampler = await play(CALL, "6", chat=chat)
    assert (episode.rollout.finish_reason, episode.rollout.turns) == ("aborted", 1)
    assert chat.asked == (PROMPT, sampler.sampled[0], [{"role": "tool", "name": "multiply", "content": "6"}])
    assert episode.ids == PROMPT + sampler.sampled[0]
    assert [message["role"] for message in episode.messages] == ["assistant"]


async def test_each_episode_has_tools_of_its_own():
    def multiply(a: int, b: int) -> int:
        """Multiply wrongly.

        Args:
            a: The first factor.
            b: The second factor.
        """
        return 7

    right, wrong = await asyncio.gather(play(CALL, "done"), play(CALL, "done", tools=ToolBox([multiply])))
    assert [episode.messages[1]["content"] for episode, _ in (right, wrong)] == ["6", "7"]


async def test_calls_are_counted_by_tool_and_by_reason():
    coerced = '<tool_call>{"name": "multiply", "arguments": {"a": "2", "b": 3.0}}</tool_call>'
    wrong = '<tool_call>{"name": "multiply", "arguments": {"a": "two", "b": 3}}</tool_call>'
    nobody = '<tool_call>{"name": "divide", "arguments": {}}</tool_call>'
    episode, _ = await play(coerced, wrong, wrong + MALFORMED, nobody, "done")
    assert episode.messages[1]["content"] == "6"
    assert (episode.rollout.tool_calls, episode.rollout.tool_failures) == (5, 4)
    assert episode.rollout.metrics == {
        "tools/multiply/calls": 3,
        "tools/multiply/failures": 2,
        "tools/multiply/failures/bad_arguments": 2,
        "tools/multiply/coerced": 1,
        "tools/unknown/calls": 2,
        "tools/unknown/failures": 2,
        "tools/unknown/failures/malformed_call": 1,
        "tools/unknown/failures/unknown_tool": 1,
    }


async def test_without_tools_nothing_is_parsed():
    episode, sampler = await play(CALL, chat=chat_format(), tools=ToolBox([]))
    assert (episode.rollout.finish_reason, len(sampler.requests)) == ("stop", 1)
    assert episode.messages == [{"role": "assistant", "content": CALL}]


CALL_SIZE = len(letter_by_letter(CALL))


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        (Limits(10, 1000, 4000, 8), "length", 1),
        (Limits(1000, CALL_SIZE, 4000, 8), "length", 1),
        (Limits(1000, CALL_SIZE + 5, 4000, 8), "length", 2),
        (Limits(1000, 1000, len(PROMPT) + 10, 8), "context", 1),
        (Limits(1000, 1000, len(PROMPT) + CALL_SIZE, 8), "context", 1),
        (Limits(1000, 1000, len(PROMPT) + CALL_SIZE + 3, 8), "context", 1),
        (Limits(1000, 1000, 4000, 1), "turn_limit", 1),
        (Limits(1000, 1000, 4000, 3), "turn_limit", 3),
    ],
)
async def test_how_an_episode_ends_that_goes_on_calling(limits, reason, turns):
    episode, sampler = await play(CALL, limits=limits)
    assert (episode.rollout.finish_reason, episode.rollout.turns) == (reason, turns)
    assert len(sampler.requests) == turns


async def test_a_tools_answer_that_does_not_fit_is_left_off():
    episode, _ = await play(CALL, limits=Limits(1000, 1000, len(PROMPT) + CALL_SIZE + 3, 8))
    assert episode.mask[-1], "the segment ends with a sampled token"
    assert [message["role"] for message in episode.messages] == ["assistant"]
    assert episode.rollout.tool_calls == 1


@given(
    turn=st.integers(1, 120),
    whole=st.integers(1, 300),
    context=st.integers(len(PROMPT) + 1, 500),
    turns=st.integers(1, 5),
    said=st.lists(st.sampled_from([CALL, MALFORMED, CALL + CALL, "6", "a" * 90]), min_size=1, max_size=5),
)
def test_no_request_exceeds_the_context_and_no_episode_its_budget(turn, whole, context, turns, said):
    limits = Limits(turn, whole, context, turns)
    episode, sampler = asyncio.run(play(*said, limits=limits))
    for ids, max_tokens in sampler.requests:
        assert 0 < max_tokens <= turn
        assert len(ids) + max_tokens <= context
    assert episode.sampled_tokens == sum(map(len, sampler.sampled)) <= whole
    assert len(episode.ids) == len(episode.mask) == len(episode.logprobs) <= context
    assert 1 <= episode.rollout.turns <= turns
    assert [t for t, sampled in zip(episode.ids, episode.mask, strict=True) if sampled] == [
        token for turn_ids in sampler.sampled for token in turn_ids
    ]
    assert episode.rollout.finish_reason in ("stop", "length", "context", "turn_limit")


async def test_a_timeout_keeps_the_turns_that_are_done():
    episode, sampler = await play(CALL, None, timeout_s=0.05)
    assert (episode.rollout.finish_reason, episode.rollout.turns) == ("timeout", 1)
    assert episode.ids == PROMPT + sampler.sampled[0]
    assert sampler.released == 1


async def test_f6_a_timeout_before_the_first_turn_fails_the_episode():
    with pytest.raises(EpisodeFailed, match=r"no turn was done in 0.05 s") as caught:
        await play(None, timeout_s=0.05)
    assert (caught.value.reason, caught.value.retryable) == ("timeout", True)


async def test_f15_a_failed_episode_lets_go_of_its_server():
    sampler = ScriptedSampler(EpisodeFailed("server", "down", retryable=True))
    with pytest.raises(EpisodeFailed):
        await EpisodeRunner(sampler, ROOMY, 5.0).run(list(PROMPT), CHAT, TOOLS, Affinity(), None)
    assert sampler.released == 1


async def test_timings_say_where_the_time_went():
    ticks = iter(range(100))
    sampler = ScriptedSampler(CALL, "6")
    runner = EpisodeRunner(sampler, ROOMY, 5.0, clock=lambda: float(next(ticks)))
    episode = await runner.run(list(PROMPT), CHAT, TOOLS, Affinity(), None)
    assert episode.rollout.timings == {"generate": 2.0, "tools": 1.0, "total": 7.0}
