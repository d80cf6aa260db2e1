"""The pretrained example: its questions, rewards, tools and tries. None of it needs the model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from slipstream.protocol.config import load as load_config
from slipstream.rollout_worker.task.task import load_task
from tests.examples.conftest import EXAMPLES, Load
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.worker import TOKENIZER, fake, roll

pytest.importorskip("reasoning_gym")

NAME = "pretrained"
FOLDER = EXAMPLES / NAME


def said(*texts: str) -> list[dict[str, Any]]:
    """A completion with these turns of the policy, each answered by a user."""
    pairs = [(("assistant", text), ("user", "no")) for text in texts]
    return [{"role": role, "content": content} for pair in pairs for role, content in pair][:-1]


def right(question: str) -> int:
    """The answer of a question, worked out here."""
    a, sign, b = re.fullmatch(r".*: (-?\d+) ([+-]) (-?\d+) =", question).groups()  # type: ignore[union-attr]
    return int(a) + int(b) * (1 if sign == "+" else -1)


@pytest.mark.parametrize("run", sorted(path.name for path in FOLDER.glob("*.toml")))
def test_held_out_questions_are_never_trained_on(load: Load, run: str) -> None:
    task = load_task(load_config(FOLDER / run).task)
    trained, held_out = list(task.dataset), list(task.eval_dataset)
    asked = [row["prompt"][-1]["content"] for row in trained + held_out]
    assert len(asked) == len(set(asked))
    assert len(held_out) == 64
    assert [row["answer"] for row in trained + held_out] == [str(right(question)) for question in asked]


@pytest.mark.parametrize(
    ("text", "reward"),
    [("7", 1.0), ("3 + 4 = 7", 1.0), ("It is 7.", 1.0), ("7 or 8", 0.0), ("seven", 0.0), ("", 0.0), ("-7", 0.5)],
)
def test_the_last_number_is_the_answer(load: Load, text: str, reward: float) -> None:
    assert load("task").correct([said(text)], ["7"]) == [reward]


@pytest.mark.parametrize(
    ("turns", "reward"),
    [(["7"], 1.0), (["8", "7"], 0.5), (["8", "9", "7"], 0.25), (["8", "9", "6"], 0.0), (["-7"], 0.0), ([""], 0.0)],
)
def test_each_wrong_try_halves_the_reward(load: Load, turns: list[str], reward: float) -> None:
    assert load("turns_task").early([said(*turns)], ["7"]) == [reward]


def test_a_wrong_try_is_answered_and_a_right_one_ends_the_episode(load: Load) -> None:
    tries = load("turns_task").Tries()
    tries.reset(answer="7", prompt=[])
    assert tries.respond(said("8")) == load("turns_task").WRONG
    assert tries.respond(said("8", "7")) is None


async def test_a_whole_worker_plays_the_tries(load: Load) -> None:
    task = load("turns_task").task
    row = task.rows.row_for(0, seed=0, shuffle=False).columns
    done = await roll(replace(task, dataset=[row]), fake(scripted(TOKENIZER, in_turn(["none", row["answer"]]))))
    assert {rollout.reward for rollout in done.rollouts} == {0.5}


async def test_a_whole_worker_calls_a_tool(load: Load) -> None:
    """The calls that the prompt shows count as no call of the policy."""
    module = load("tool_task")
    a, b = 12, 34
    row = {"prompt": [*module.rows()[0]["prompt"][:-1], {"role": "user", "content": "12 + 34 ="}], "answer": "46"}
    call = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}</tool_call>"
    shown = len(module.SHOWN)
    for replies, reward in ([call, "46"], 1.5), ([call, "none"], 0.5), (["46"], 1.0), (["none"], 0.0):
        policy = scripted(TOKENIZER, in_turn([""] * shown + replies))
        done = await roll(replace(module.task, dataset=[row]), fake(policy))
        assert {rollout.reward for rollout in done.rollouts} == {reward}, replies


def test_the_shown_calls_answer_their_questions(load: Load) -> None:
    module = load("tool_task")
    tools = {tool.__name__: tool for tool in (module.add, module.subtract)}
    for name, a, b in module.SHOWN:
        question, _ = module.shown(name, a, b)
        assert tools[name](a, b) == right(question["content"])


def test_the_demonstrations_call_the_right_tool_and_none_is_of_a_held_out_question(load: Load) -> None:
    module = load("calls_task")
    tools = {tool.__name__: tool for tool in (module.add, module.subtract)}
    held_out = [row["prompt"][-1]["content"] for row in module.task.eval_dataset]
    written = module.questions[module.HELD_OUT : module.HELD_OUT + module.WRITTEN]
    assert len(written) == 500
    for row in written:
        question, calling, result, answer = module.demonstration(row)["messages"]
        function = calling["tool_calls"][0]["function"]
        assert question["content"] not in held_out
        assert tools[function["name"]](**function["arguments"]) == right(question["content"])
        assert result["content"] == str(right(question["content"])) == answer["content"].split()[-1]
