"""Makes conversations for the warm start: correct ones, and flawed ones with bad habits that RL then removes."""

from __future__ import annotations

import random

from task import LETTERS, Question, draw
from tiny_policy.demonstration import Demonstration, Message, calls, result, says, with_another_digit

# Shares of the flaws among flawed demonstrations. They set the reward that RL starts from.
FLAWS = {"wrong_program": 0.40, "nothing_printed": 0.20, "no_second_try": 0.20, "no_program": 0.10, "misquote": 0.10}
FLAWED_SHARE = 0.6
# Share of the correct demonstrations with an error first, so that the policy has seen how to fix one.
SECOND_TRY_SHARE = 0.15


def correct(rng: random.Random) -> Demonstration:
    """Draw a demonstration that ends with the right answer."""
    question = draw(rng)
    turns = [*_printed(question.expression), says(str(question.answer))]
    if rng.random() < SECOND_TRY_SHARE:
        return Demonstration(question.prompt, [*_broken(question), *turns], given=1)
    return Demonstration(question.prompt, turns)


def mixed(rng: random.Random) -> Demonstration:
    """Draw a demonstration that is flawed with probability `FLAWED_SHARE`, else correct."""
    if rng.random() >= FLAWED_SHARE:
        return correct(rng)
    flaw = rng.choices(list(FLAWS), weights=list(FLAWS.values()))[0]
    while True:
        question = draw(rng)
        turns = _flawed(question, flaw, rng)
        # Another program may print the same by chance.
        if turns[-1]["content"] != str(question.answer):
            return Demonstration(question.prompt, turns)


def _flawed(question: Question, flaw: str, rng: random.Random) -> list[Message]:
    guess = says(with_another_digit(question.answer, rng))
    if flaw == "wrong_program":
        wrong = _changed(question.expression, rng)
        return [*_printed(wrong), says(str(eval(wrong)))]
    if flaw == "nothing_printed":
        return [*_ran(question.expression, "(nothing printed)"), guess]
    if flaw == "no_second_try":
        return [*_broken(question), guess]
    if flaw == "no_program":
        return [guess]
    return [*_printed(question.expression), guess]


def _printed(expression: str) -> list[Message]:
    return _ran(f"print({expression})", str(eval(expression)))


def _broken(question: Question) -> list[Message]:
    """Run the program with a bracket missing."""
    return _ran(f"print({question.expression}", "SyntaxError: '(' was never closed (program, line 1)")


def _ran(code: str, output: str) -> list[Message]:
    return [calls(("python", {"code": code})), result("python", output)]


def _changed(expression: str, rng: random.Random) -> str:
    """Return an expression without the last number, with another letter, or with one word alone."""
    if " + 1" in expression:
        return expression.replace(" + 1", "")
    if ".count" in expression:
        return f"{expression[:-3]}{rng.choice(LETTERS)}')"
    return expression.split(" + ")[0] + ")"
