"""The calculator example: its tools, and expressions that need two rounds of them."""

from __future__ import annotations

import random

from tests.examples.conftest import Load

NAME = "calculator"


def test_the_tools_calculate(load: Load) -> None:
    tools = load("task").TOOLS
    assert [tools[sign](17, 5) for sign in "+-*/"] == [22, 12, 85, 3]


def test_expressions_are_what_python_makes_of_them_and_whole_and_not_negative(load: Load) -> None:
    task = load("task")
    rng = random.Random(0)
    for _ in range(1000):
        expression = task.draw(rng)
        assert expression.value == eval(str(expression)) >= 0
        assert len(expression.pairs) in (1, 2)


def test_two_pairs_are_called_side_by_side_and_joined_in_the_next_turn(load: Load) -> None:
    task, demonstrations = load("task"), load("demonstrations")
    expression = task.Expression(task.Pair(12, "+", 7), "*", task.Pair(9, "-", 4))
    assert (str(expression), expression.value) == ("(12 + 7) * (9 - 4)", 95)
    rng = random.Random(0)
    demo = next(demo for demo in iter(lambda: demonstrations.correct(rng), None) if ") " in demo.prompt[0]["content"])
    rounds = [len(turn["tool_calls"]) for turn in demo.turns if "tool_calls" in turn]
    assert rounds[-1] == 1
    assert rounds[0] == demo.prompt[0]["content"].count("(")


def test_the_reward_wants_the_value_and_nothing_else(load: Load) -> None:
    said = ["95", " 95", "95.", "94", ""]
    completions = [[{"role": "assistant", "content": text}] for text in said]
    assert load("task").accuracy(completions, answer=[95] * len(said)) == [1.0, 0.0, 0.0, 0.0, 0.0]
