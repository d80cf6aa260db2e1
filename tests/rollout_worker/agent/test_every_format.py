"""In every chat format that takes tools, a conversation at the endpoint is the same ids as in the native loop."""

import itertools
import json
import time

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.agent.forced_calls import frame_of
from slipstream.rollout_worker.agent.formats import ChatFormats
from slipstream.rollout_worker.agent.session import AgentContext, Session
from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.chat.format_check import check_tool_format, turn_begins, turn_ends
from slipstream.rollout_worker.episodes.capacity import Capacity
from slipstream.rollout_worker.episodes.episode import EpisodeSetup
from slipstream.rollout_worker.episodes.limits import Deadline, EpisodeLimits
from slipstream.rollout_worker.episodes.runner import EpisodeRunner
from slipstream.rollout_worker.inference.engine import Sampled, SampledSpan
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests import kit
from tests.kit import renderer_cases, template_cases
from tests.kit.agent import MULTIPLY, results_of
from tests.kit.worker import multiply

pytestmark = pytest.mark.families("case")
CASES = [*renderer_cases.CASES, *template_cases.CASES]
TOOLS = ToolBox([multiply])
QUESTION = {"role": "user", "content": "Multiply 100 by 107."}
LIMITS = EpisodeLimits(max_turn_tokens=1000, max_episode_tokens=2000, max_model_len=8000, max_turns=8)


class ScriptedSampler:
    """Gives the turns in order, whatever is asked."""

    def __init__(self, *turns):
        self.turns = list(turns)
        self.pool = self

    async def sample(self, affinity, prompt, max_tokens, pending=None, own=None, known=0, images=()):
        ids = self.turns.pop(0)
        return Sampled(list(ids), [-1.0] * len(ids), [SampledSpan(1, 0, len(ids), "vllm-0")], "stop")

    def release(self, affinities):
        """Nothing is held."""


def calling(arguments, ids):
    calls = [
        {"type": "function", "id": ids.format(place), "function": {"name": "multiply", "arguments": each}}
        for place, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def ways(arguments):
    """Messages with these calls: with ids as notations ask for them, without reasoning and with it."""
    for ids in ("call0000{}", "functions.multiply:{}"):
        message = calling(arguments, ids) if arguments else {"role": "assistant", "content": "10700"}
        yield from (message, {**message, "reasoning_content": "so"})


async def turn_of(chat, arguments=()):
    """The ids of a turn with these calls, as the format writes it and reads it back."""
    prompt = await chat.render_ids([QUESTION], generation_prompt=True)
    bare = await chat.render_ids([QUESTION], generation_prompt=False)
    for message, follows in itertools.product(ways(arguments), (True, False)):
        # What ends a turn may be what begins the next message.
        results = [
            {"role": "tool", "name": "multiply", "tool_call_id": call["id"], "content": "6"}
            for call in message.get("tool_calls", [])
        ]
        following = (results or [QUESTION]) if follows else []
        whole = await chat.render_ids([QUESTION, message, *following], generation_prompt=follows)
        begin = turn_begins(chat, prompt, bare, whole)
        end = turn_ends(chat, whole, begin or 0)
        turn = whole[begin:end] if begin is not None and end is not None else []
        calls = chat.parse(prompt, turn).calls
        if turn and [getattr(call, "name", None) for call in calls] == ["multiply"] * len(arguments):
            return turn
    return None


def runner(sampler):
    return EpisodeRunner(sampler, LIMITS, 30.0, Capacity(4, 4, time.monotonic))


def session_of(plain, chat, *turns):
    context = AgentContext(
        ChatFormats(plain, lambda schemas: chat), runner(ScriptedSampler(*turns)), kit.config().rollout
    )
    return Session(context, Affinity(), 1.0, Deadline(30.0))


async def ask(session, messages):
    body = {"model": "policy", "messages": messages, "tools": [MULTIPLY]}
    completion = await session.answer(json.dumps(body).encode())
    return json.loads(completion.whole())["choices"][0]["message"]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}, {case.how}, {case.thinking}")
async def test_the_same_ids_as_in_the_native_loop(case, calls):
    try:
        chat, plain = case.build(TOOLS.schemas), case.build([])
    except ConfigError:
        pytest.skip("it takes no tools")
    proof = await check_tool_format(chat, TOOLS.schemas)
    if not proof.fit_for_tools or (calls > 1 and not proof.parallel_calls):
        pytest.skip("it takes no tools, or no two calls in a turn")
    turn, done = await turn_of(chat, [{"a": 100, "b": 107}, {"a": 2, "b": 3}][:calls]), await turn_of(chat)
    assert turn is not None
    assert done is not None

    native = await runner(ScriptedSampler(turn, done)).run(
        EpisodeSetup([QUESTION], await chat.prompt_ids([QUESTION]), chat, TOOLS), Affinity()
    )

    session = session_of(plain, chat, turn, done)
    first = await ask(session, [QUESTION])
    assert len(first["tool_calls"]) == calls
    assert (await ask(session, [QUESTION, first, *results_of(first)]))["content"] is not None
    ours = session.episode("stop", 1.0)
    assert [draft.ids for draft in ours.drafts] == [draft.ids for draft in native.drafts]
    assert [draft.mask for draft in ours.drafts] == [draft.mask for draft in native.drafts]
    assert ours.messages == native.messages


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}, {case.how}, {case.thinking}")
async def test_a_users_message_behind_the_results_is_appended_as_the_format_writes_it(case):
    """Or a new segment opens, whose prompt is the whole conversation."""
    try:
        chat, plain = case.build(TOOLS.schemas), case.build([])
    except ConfigError:
        pytest.skip("it takes no tools")
    if not (await check_tool_format(chat, TOOLS.schemas)).fit_for_tools:
        pytest.skip("it takes no tools")
    turn, done = await turn_of(chat, [{"a": 100, "b": 107}]), await turn_of(chat)
    session = session_of(plain, chat, turn, done)
    first = await ask(session, [QUESTION])
    await ask(session, [QUESTION, first, *results_of(first), {"role": "user", "content": "Are you sure?"}])
    ours = session.episode("stop", 1.0)
    try:
        expected = await chat.render_ids([QUESTION, *ours.messages[:-1]], generation_prompt=True)
    except PromptError:
        pytest.skip("it takes no user's message behind results")
    assert sum(sum(draft.mask) for draft in ours.drafts) == len(turn) + len(done)
    if len(ours.drafts) == 1:
        (draft,) = ours.drafts
        suffix = draft.ids[draft.prompt_size + len(turn) : len(draft.ids) - len(done)]
        assert suffix == expected[-len(suffix) :]
    else:
        assert ours.drafts[-1].ids[: -len(done)] == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}, {case.how}, {case.thinking}")
async def test_what_an_answer_may_be_held_to_is_a_call_as_the_format_writes_it(case):
    try:
        chat = case.build(TOOLS.schemas)
    except ConfigError:
        pytest.skip("it takes no tools")
    frame = await frame_of(chat, "multiply")
    if frame is None:
        pytest.skip("it writes no JSON that a call could be held to")
    turn = await turn_of(chat, [{"a": 100, "b": 107}])
    assert turn is not None
    written = chat.tokenizer.decode(turn, skip_special_tokens=False)
    assert frame[0] in written
    assert frame[1] in written.partition("107")[2]
