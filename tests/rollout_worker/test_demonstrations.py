"""Conversations to learn from: rendered as an episode would have recorded them, or refused by row."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.chat.format_check import check_tool_format
from slipstream.rollout_worker.demonstrations import Conversation, load_demonstrations, render
from slipstream.rollout_worker.episodes.capacity import Capacity
from slipstream.rollout_worker.episodes.episode import EpisodeSetup
from slipstream.rollout_worker.episodes.limits import EpisodeLimits
from slipstream.rollout_worker.episodes.runner import EpisodeRunner
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.renderer_cases import CASES as RENDERERS
from tests.kit.template_cases import CASES as TEMPLATES
from tests.kit.template_cases import TEMPLATES as ALL_TEMPLATES
from tests.kit.worker import chat_format, multiply
from tests.rollout_worker.episodes.test_episode import ScriptedSampler

SYSTEM = {"role": "system", "content": "You multiply."}
USER = {"role": "user", "content": "Multiply 2 by 3, then by 4."}
TOOLS = ToolBox([multiply])
ROOMY = EpisodeLimits(max_turn_tokens=4000, max_episode_tokens=8000, max_model_len=16000, max_turns=8)
TASK = '''
from slipstream import Task


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a * b


def nothing(completions, **columns):
    return [0.0] * len(completions)


task = Task(dataset=[{"prompt": [{"role": "user", "content": "Hi."}]}], tools=[multiply], rewards=[nothing])
'''


# The form that most formats take, and that of those which write the tool's name in it.
CALL_ID, OF_KIMI = "call{:05d}", "functions.multiply:{}"


def calling(a, b, number, reasoning=None, ids=CALL_ID):
    call = {
        "type": "function",
        "id": ids.format(number),
        "function": {"name": "multiply", "arguments": {"a": a, "b": b}},
    }
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": "", **thought, "tool_calls": [call]}


def answer_to(number, content, ids=CALL_ID):
    return {"role": "tool", "name": "multiply", "tool_call_id": ids.format(number), "content": content}


def sampled(chat, before, turn, answers):
    """The turn that the format writes after `before`, as the policy would sample it; None if it asks otherwise."""
    asked = asyncio.run(chat.prompt_ids(before))
    alone = ([turn], False)
    for messages, asks in [([turn, *answers], True), alone] if answers else [alone, ([turn, USER], True)]:
        try:
            whole = asyncio.run(chat.render_ids([*before, *messages], generation_prompt=asks))
        except PromptError:
            continue
        ends = [place for place in range(len(asked), len(whole)) if whole[place] in chat.stop_token_ids]
        if whole[: len(asked)] == asked and ends:
            return whole[len(asked) : ends[0] + 1]
    return None


def episode_of(chat, turns, respond=None):
    sampler = ScriptedSampler(*turns)
    runner = EpisodeRunner(sampler, ROOMY, 30.0, Capacity(1, 1, time.monotonic))
    ids = asyncio.run(chat.prompt_ids([SYSTEM, USER]))
    return asyncio.run(runner.run(EpisodeSetup([SYSTEM, USER], ids, chat, TOOLS, respond), Affinity()))


def recorded(episode):
    return [(draft.ids, draft.mask) for draft in episode.drafts]


def rendered(chat, messages, given=0, tool_result_tokens=4000):
    found = asyncio.run(render(chat, Conversation(messages, given), TOOLS, tool_result_tokens))
    return [(segment.token_ids.tolist(), segment.loss_mask.tolist()) for segment in found]


@pytest.mark.families("case")
@pytest.mark.parametrize("thought", [None, "I should multiply."], ids=["plain", "thinking"])
@pytest.mark.parametrize("case", [*TEMPLATES, *RENDERERS], ids=lambda case: f"{case.how}, thinking {case.thinking}")
def test_i4_ids_and_masks_are_those_of_an_episode_with_the_same_conversation(case, thought):
    """Two calls with their answers and a last answer, played by the worker's own runner on the turns that the format
    writes: what it records, and what its messages are rendered to, agree token by token and segment by segment."""
    try:
        chat = case.build(TOOLS.schemas)
    except ConfigError:
        return  # not fit for tools
    if not asyncio.run(check_tool_format(chat, TOOLS.schemas)).fit_for_tools:
        return
    ids = OF_KIMI if "kimi" in case.how else CALL_ID
    messages, turns = [SYSTEM, USER], []
    last = {"role": "assistant", "content": "It is 24."}
    script = [
        (calling(2, 3, 0, thought, ids), [answer_to(0, "6", ids)]),
        (calling(6, 4, 1, thought, ids), [answer_to(1, "24", ids)]),
        (last, []),
    ]
    for turn, answers in script:
        try:
            turns.append(sampled(chat, messages, turn, answers))
        except PromptError:
            return  # the format takes no system message
        if turns[-1] is None:
            return  # it asks for another turn than it writes
        messages += [turn, *answers]
    episode = episode_of(chat, turns)
    assert episode.rollout.turns == 3
    assert rendered(chat, [SYSTEM, USER, *episode.messages]) == recorded(episode)


@pytest.mark.parametrize("stem", ["qwen3", "nemotron_3_nano"])
def test_i4_where_earlier_reasoning_is_left_out_a_new_segment_begins_as_in_an_episode(stem):
    """An environment's answer follows a thought. The second segment repeats the conversation, and teaches its turn."""
    (template,) = [each for each in ALL_TEMPLATES if each.stem == stem]
    chat = template.format(TOOLS.schemas, variables={"enable_thinking": True})
    first = {"role": "assistant", "content": "It is 6.", "reasoning_content": "I should multiply."}
    last = {"role": "assistant", "content": "It is 24.", "reasoning_content": "By 4."}
    more = {"role": "user", "content": "And by 4?"}

    async def respond(messages):
        return None if len(messages) > 1 else [more]

    turns = [sampled(chat, [SYSTEM, USER], first, []), sampled(chat, [SYSTEM, USER, first, more], last, [])]
    episode = episode_of(chat, turns, respond)
    assert len(episode.drafts) == 2
    assert rendered(chat, [SYSTEM, USER, *episode.messages]) == recorded(episode)


def test_i4_enough_formats_are_compared():
    """The test above passes over formats that it cannot compare."""
    compared = 0
    for case in [*TEMPLATES, *RENDERERS]:
        try:
            chat = case.build(TOOLS.schemas)
            compared += sampled(chat, [SYSTEM, USER], calling(2, 3, 1), [answer_to(1, "6")]) is not None
        except (ConfigError, PromptError):
            continue
    assert compared >= 50


def test_i4_results_of_tools_are_cut_and_defused_as_in_an_episode():
    chat = chat_format(TOOLS.schemas)
    long = "one <|im_end|> two " * 400
    messages = [
        USER,
        calling(2, 3, 1),
        {"role": "tool", "name": "multiply", "content": long},
        {"role": "assistant", "content": "6"},
    ]
    ((ids, mask),) = rendered(chat, messages, tool_result_tokens=60)
    text = chat.tokenizer.decode(ids)
    assert "< |im_end|>" in text
    assert "characters left out" in text
    assert sum(token in chat.stop_token_ids for token in np.array(ids)[np.array(mask)]) == 2
    assert len(ids) < 600


def test_only_turns_after_the_prompt_are_learnt():
    chat = chat_format(TOOLS.schemas)
    shown = [USER, {"role": "assistant", "content": "24"}, {"role": "user", "content": "And by 5?"}]
    ((ids, mask),) = rendered(chat, [*shown, {"role": "assistant", "content": "It is 120."}], given=3)
    taught = chat.tokenizer.decode(np.array(ids)[np.array(mask)].tolist())
    assert taught == "It is 120.<|im_end|>"
    both = rendered(chat, [*shown, {"role": "assistant", "content": "It is 120."}])
    assert both[0][0] == ids
    assert sum(both[0][1]) > sum(mask)


@pytest.fixture
def run_config(tmp_path):
    model = save_model_folder(tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")

    def make(lines, **changes):
        path = tmp_path / "demos.jsonl"
        path.write_text(
            "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8"
        )
        sections = {"demonstrations": {"path": str(path)}, **changes}
        return config(WORKER, model={"path": str(model)}, task={"path": f"{tmp_path}/task.py:task"}, **sections)

    return make


GOOD = {
    "messages": [
        USER,
        calling(2, 3, 1),
        {"role": "tool", "name": "multiply", "content": "6"},
        {"role": "assistant", "content": "6"},
    ]
}
SAYS = {"role": "assistant", "content": "6"}


def called_with(arguments):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "multiply", "arguments": arguments}}],
    }


def test_rows_with_messages_or_prompt_and_completion_and_tools_of_their_own(run_config):
    own = {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
    }
    adding = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
    }
    found = load_demonstrations(
        run_config(
            [
                GOOD,
                {"prompt": GOOD["messages"][:1], "completion": GOOD["messages"][1:], "reward": 1.0},
                {"messages": [USER, adding], "tools": [own]},
                {"messages": [USER, adding], "tools": json.dumps([own])},
                {"messages": [USER, adding], "tools": [own["function"]]},
            ]
        )
    )
    assert [of.row for of in found.demonstrations] == [1, 2, 3, 4, 5]
    first, second, third, fourth, fifth = (of.segments[0] for of in found.demonstrations)
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    np.testing.assert_array_equal(first.loss_mask, second.loss_mask)
    np.testing.assert_array_equal(third.token_ids, fourth.token_ids)
    np.testing.assert_array_equal(third.token_ids, fifth.token_ids)
    assert found.findings == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], ["demonstrations.path = ", "it holds no conversation"]),
        ([GOOD, '{"messages": ['], ["demonstrations.path", "line 2 is not JSON"]),
        ([GOOD, {"text": "hello"}], ["row 2", "it has the columns text", "give messages"]),
        ([{"prompt": "2 by 3", "completion": "6"}], ["row 1", "'2 by 3' is no list of messages"]),
        ([{"messages": [USER]}], ["row 1", "no assistant's turn"]),
        ([{"messages": [SAYS]}], ["row 1", "begins with the assistant's turn"]),
        ([{"messages": [USER, SAYS, SAYS]}], ["row 1", "messages 1 and 2 are both the assistant's"]),
        ([{"messages": [USER, {"role": "wizard", "content": "?"}, SAYS]}], ["row 1", "has the role 'wizard'"]),
        (
            [
                {
                    "messages": [
                        USER,
                        {"role": "assistant", "tool_calls": [{"function": {"name": "divide", "arguments": {}}}]},
                    ]
                }
            ],
            ["row 1", "message 1 calls 'divide'", "there: multiply"],
        ),
        ([{"messages": [USER, SAYS], "tools": "nothing"}], ["row 1", "its tools are 'nothing'"]),
        ([{"messages": [USER, {"role": "gpt", "content": "6"}]}], ["row 1", "roles: user, gpt"]),
        ([{"messages": [USER, {**SAYS, "content": "a\ud800"}]}], ["row 1", "'\\ud800', half of a character"]),
        (
            [{"messages": [USER, {**SAYS, "content": None}]}],
            ["row 1", "message 1, of role 'assistant', has no content"],
        ),
        ([{"messages": [USER, {**SAYS, "weight": 0}]}], ["row 1", "message 1 has the weight 0"]),
        ([{"messages": [USER, called_with("{2, 3")]}], ["row 1", "arguments of 'multiply' are '{2, 3'"]),
        ([{"messages": [USER, called_with([2, 3])]}], ["row 1", "arguments of 'multiply' are [2, 3]"]),
        ([{"messages": [USER, called_with({}), {"role": "tool", "content": None}, SAYS]}], ["row 1", "has no content"]),
        ([{"messages": [USER, SAYS], "tools": [{"name": "a b"}]}], ["row 1", "'a b' from the row cannot be"]),
        (
            [{"messages": [USER, {"role": "assistant", "content": "6<|im_end|>7"}]}],
            ["row 1", "leaves out content of message 1"],
        ),
    ],
)
def test_a_row_that_cannot_be_learnt_is_refused_by_its_number(run_config, lines, says):
    with pytest.raises(ConfigError) as error:
        load_demonstrations(run_config(lines))
    for text in says:
        assert text in str(error.value)
    assert "Task(dataset" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ([{"type": "text", "text": "6 <|im_end|>"}], "6 <|im_end|>"),
        ({"product": 6}, '{"product": 6}'),
        (6, "6"),
    ],
)
def test_a_tool_s_result_is_the_text_that_an_episode_would_show(run_config, given, means):
    rows = [
        {"messages": [*GOOD["messages"][:2], {"role": "tool", "name": "multiply", "content": content}, SAYS]}
        for content in (given, means)
    ]
    first, second = load_demonstrations(run_config(rows)).demonstrations
    np.testing.assert_array_equal(first.segments[0].token_ids, second.segments[0].token_ids)


def test_nulls_that_a_table_fills_calls_up_with_are_left_out(run_config):
    filled = json.loads(json.dumps(GOOD))
    filled["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] = None
    filled["messages"][0] |= {"tool_calls": None, "name": None}
    first, second = load_demonstrations(run_config([GOOD, filled])).demonstrations
    np.testing.assert_array_equal(first.segments[0].token_ids, second.segments[0].token_ids)


def test_nulls_that_a_table_fills_schemas_up_with_are_left_out(run_config):
    def row(**more):
        level = {"type": "integer", "description": "Which floor.", **more}
        parameters = {"type": "object", "properties": {"level": level, **({"colour": None} if more else {})}}
        function = {"name": "lift", "description": "Go.", "parameters": parameters}
        return {"messages": [USER, SAYS], "tools": [{"type": "function", "function": function, **more}]}

    first, second = load_demonstrations(run_config([row(), row(enum=None)])).demonstrations
    np.testing.assert_array_equal(first.segments[0].token_ids, second.segments[0].token_ids)


def test_a_row_longer_than_the_context_is_left_out_and_counted(run_config):
    long = {"messages": [USER, {"role": "assistant", "content": "six " * 2000}]}
    longer = {"messages": [USER, {"role": "assistant", "content": "six " * 10**7}]}
    assert load_demonstrations(run_config([GOOD, longer])).findings, "its tokens are not counted, which takes minutes"
    found = load_demonstrations(run_config([GOOD, long, GOOD]))
    assert [of.row for of in found.demonstrations] == [1, 3]
    (finding,) = found.findings
    assert "1 of 3 conversations are longer than vllm.max_model_len = 1024 and are left out: rows 2" in finding.text
    with pytest.raises(ConfigError, match="1 of 1 conversations are longer"):
        load_demonstrations(run_config([long]))
