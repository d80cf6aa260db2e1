"""Defines the task of `tool_task.py` without a call in the prompt, and the conversations that teach the call instead.

`python calls_task.py > calls.jsonl` writes 500 of them, from questions that are not held out.
"""

from __future__ import annotations

import json
import re
from typing import Any

from task import correct
from tool_task import HELD_OUT, SUMS, add, called, subtract

from slipstream import Task

WRITTEN = 500

TOOLS = {"+": add, "-": subtract}


def rows() -> list[dict[str, Any]]:
    """List each question once, in the order in which Reasoning Gym draws them."""
    answers = {entry["question"]: entry["answer"] for entry in SUMS}
    return [
        {"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in answers.items()
    ]


def demonstration(row: dict[str, Any]) -> dict[str, Any]:
    """Return the conversation that answers a question: a call, its result, and the answer."""
    a, sign, b = re.findall(r"(-?\d+) ([+-]) (-?\d+) =", row["prompt"][-1]["content"])[0]
    tool = TOOLS[sign]
    call = {"type": "function", "function": {"name": tool.__name__, "arguments": {"a": int(a), "b": int(b)}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool.__name__, "content": str(tool(int(a), int(b)))},
        {"role": "assistant", "content": f"{a} {sign} {b} = {row['answer']}"},
    ]
    return {"messages": [*row["prompt"], *turns]}


questions = rows()
task = Task(
    dataset=questions[HELD_OUT:],
    eval_dataset=questions[:HELD_OUT],
    tools=[add, subtract],
    rewards=[called, correct],
    reward_weights=[0.5, 1.0],
)

if __name__ == "__main__":
    for row in questions[HELD_OUT : HELD_OUT + WRITTEN]:
        print(json.dumps(demonstration(row)))
