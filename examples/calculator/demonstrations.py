"""Makes conversations for the warm start: correct ones, and flawed ones with bad habits that RL then removes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from task import TOOLS, VALUES, Pair, draw, joined, prompt
from tiny_policy.demonstration import Demonstration, Message, calls, result, says, with_another_digit

# Shares of the flaws among flawed demonstrations. They set the reward that RL starts from.
FLAWS = {"wrong_operator": 0.35, "one_call_too_few": 0.30, "no_tool": 0.15, "misquote": 0.20}
FLAWED_SHARE = 0.6


def correct(rng: random.Random) -> Demonstration:
    """Draw a demonstration that works out the pairs in one turn with parallel calls, then joins them, then answers."""
    expression = draw(rng)
    last = joined(expression)
    turns = [*_calculated(expression.pairs), *_calculated([last]), says(str(last.value))]
    return Demonstration(prompt(expression), turns)


def mixed(rng: random.Random) -> Demonstration:
    """Draw a demonstration that is flawed with probability `FLAWED_SHARE`, else correct."""
    if rng.random() >= FLAWED_SHARE:
        return correct(rng)
    expression = draw(rng)
    last = joined(expression)
    asked = prompt(expression)
    flaw = rng.choices(list(FLAWS), weights=list(FLAWS.values()))[0]
    if flaw == "no_tool":
        return Demonstration(asked, [says(with_another_digit(last.value, rng))])
    first = _calculated(expression.pairs)
    if flaw == "one_call_too_few":
        # The policy gives the last result as its answer.
        unfinished = expression.pairs[-1].value
        answer = str(unfinished) if unfinished != last.value else with_another_digit(last.value, rng)
        return Demonstration(asked, [*first, says(answer)])
    if flaw == "wrong_operator":
        others = [sign for sign in VALUES if sign != last.sign and (sign != "/" or last.b)]
        wrong = [Pair(last.a, sign, last.b) for sign in others]
        last = rng.choice([pair for pair in wrong if pair.value != last.value] or wrong)
        return Demonstration(asked, [*first, *_calculated([last]), says(str(last.value))])
    return Demonstration(asked, [*first, *_calculated([last]), says(with_another_digit(last.value, rng))])


def _calculated(pairs: Sequence[Pair]) -> list[Message]:
    """Make one turn with a call for each pair, and the results."""
    named = [(TOOLS[pair.sign].__name__, {"a": pair.a, "b": pair.b}) for pair in pairs]
    answers = [result(name, pair.value) for (name, _), pair in zip(named, pairs, strict=True)]
    return [calls(*named), *answers]
