"""Chooses the parser for a template's tool calls: the one that reads back a call that the template itself wrote.

`same_value` decides whether a value that was read back is the value that was written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.parsers import NAMES, Before, Parser, Thought, by_name
from slipstream.rollout_worker.chat.parsers.base import Message, ToolCall, Unreadable
from slipstream.rollout_worker.chat.parsers.custom import ResponseTemplate, load_own
from slipstream.rollout_worker.chat.parsers.literal_calls import Literals
from slipstream.rollout_worker.chat.template_analysis import REFUSALS, USER, Rendering, Unfit

_LITERALS = Literals()

# Some templates want a call id of nine letters and digits. Others want the tool's name and the call's position.
_IDS = ("slip7f3a9", "functions.slipstream_tool:0")

ARGUMENTS: dict[str, Any] = {"number": 7, "text": "plain words"}


def same_value(written: Any, read: Any) -> bool:
    """Return whether the value that was read is the value that was written.

    Notations that write every value as text give text back. Such text is the same value if it reads as that value in
    JSON or in Python's notation. The tools' schemas then decide which type is meant.
    """
    if isinstance(written, dict) and isinstance(read, dict):
        return written.keys() == read.keys() and all(same_value(written[key], read[key]) for key in written)
    if isinstance(read, str) and not isinstance(written, str):
        return any(value == written and type(value) is type(written) for value in _readings(read))
    return bool(read == written) and isinstance(read, bool) == isinstance(written, bool)


def _readings(text: str) -> list[Any]:
    readings = []
    with contextlib.suppress(ValueError, RecursionError):
        readings.append(json.loads(text))
    with contextlib.suppress(Unreadable):
        value, end = _LITERALS.read(text, 0)
        if not text[end:].strip():
            readings.append(value)
    return readings


@dataclass(frozen=True, slots=True)
class ParserMatch:
    """Holds the chosen parser and the rendering whose calls it reads.

    Attributes:
        name: The parser's name, for messages.
        parser: The parser.
        rendering: The rendering, with arguments in the form that the template accepts.
        shows_ids: The template writes the ids of calls, or asks for them.
        around: Matches what the template writes around calls and the parser leaves in the content; None if nothing.
    """

    name: str
    parser: Parser
    rendering: Rendering
    shows_ids: bool
    around: re.Pattern[str] | None = None


def choose_parser(setting: str, rendering: Rendering, stops: Sequence[str], thought: Thought, end: str) -> ParserMatch:
    """Choose the parser that `setting` names, or with `auto` the first that reads the template's calls back.

    Args:
        setting: The value of `chat.parser`.
        rendering: The template's rendering.
        stops: Texts of the tokens that end a turn.
        thought: How the template writes reasoning.
        end: Text of the token that ends a turn, for the tokenizer's own response template.

    Returns:
        The parser and the rendering whose calls it reads. A parser that the user named is returned even if it does not
        read a call back.

    Raises:
        ConfigError: There is no parser of that name.
        Unfit: `auto` finds no parser that reads the template's calls.
    """
    shows_ids = _shows_ids(rendering)
    candidates = list(_candidates(setting, rendering, thought, end))
    others = rendering.but(arguments_as_text=not rendering.arguments_as_text)
    for tried, an_id in itertools.product((rendering, others), _IDS):
        written = _written_call(tried, stops, an_id)
        if written is None:
            continue
        for name, parser in candidates:
            if _reads_back(parser, *written):
                two = _written_call(tried, stops, an_id, calls=2)
                return ParserMatch(name, parser, tried, shows_ids, _around(parser, written, two))
    if setting != "auto":  # the user may know better; the start check reports failures
        (name, parser), *_ = candidates
        return ParserMatch(name, parser, rendering, shows_ids)
    if _written_call(rendering, stops, _IDS[0]) is None:
        try:
            rendering(_conversation(_IDS[0]))
        except REFUSALS as error:
            raise Unfit(f"it refuses a turn that calls a tool ({error})") from None
        raise Unfit("it leaves out the tool calls of the assistant, so their notation cannot be found")
    raise Unfit(
        f"none of the notations ({', '.join(NAMES)}) reads back a tool call that it wrote; name one with chat.parser, "
        f"or a function of yours with chat.parser = path/to/file.py:function"
    )


def _candidates(setting: str, rendering: Rendering, thought: Thought, end: str) -> Iterator[tuple[str, Parser]]:
    own = ("response template", ResponseTemplate(rendering.tokenizer, rendering.tools or [], end))
    has_own = getattr(rendering.tokenizer, "response_template", None) is not None
    if ".py:" in setting:
        yield setting, load_own(setting)
    elif setting == "auto":
        yield from [own] if has_own else []
        yield from ((name, by_name(name, thought)) for name in NAMES)
    elif setting in NAMES:
        yield setting, by_name(setting, thought)
    elif setting == "response_template" and has_own:
        yield own
    else:
        raise ConfigError(
            f"chat.parser = {setting}: there is no such parser; take auto, one of {', '.join(NAMES)}, or a function of "
            f"yours as path/to/file.py:function"
        )


def _conversation(an_id: str, calls: int = 1) -> list[Message]:
    ids = [an_id[:-1] + str((int(an_id[-1]) + place) % 10) for place in range(calls)]
    function = {"name": "slipstream_tool", "arguments": ARGUMENTS}
    made = [{"type": "function", "id": each, "function": function} for each in ids]
    answers = [{"role": "tool", "name": "slipstream_tool", "tool_call_id": each, "content": "a result"} for each in ids]
    return [USER, {"role": "assistant", "content": "", "tool_calls": made}, *answers]


def _written_call(rendering: Rendering, stops: Sequence[str], an_id: str, calls: int = 1) -> tuple[str, Before] | None:
    """Return a turn with calls, as the template writes it, and the prompt before it. None if it writes no call."""
    try:
        text, prompt = rendering(_conversation(an_id, calls)), rendering([USER])
    except REFUSALS:
        return None
    shared = next((place for place, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(prompt))
    if shared < len(prompt):  # an empty thought was left out, and the tags may begin alike
        shared = max(prompt.rfind(tag, 0, shared + 1) for tag in "<[")
    turn = text[shared:]
    at = turn.find("slipstream_tool")
    found = min((place for stop in stops if (place := turn.find(stop, at)) >= 0), default=-1)
    if at < 0 or found < 0:
        return None
    return turn[:found], Before(prompt, "")


def _reads_back(parser: Parser, turn: str, before: Before) -> bool:
    calls = parser(turn, before).calls
    if len(calls) != 1 or not isinstance(call := calls[0], ToolCall):
        return False
    return call.name == "slipstream_tool" and same_value(ARGUMENTS, call.arguments)


def _around(parser: Parser, one: tuple[str, Before], two: tuple[str, Before] | None) -> re.Pattern[str] | None:
    """Return a pattern for what stays in the content of a turn that only calls: of one call, and of several.

    Args:
        parser: The parser that reads the calls.
        one: A turn with one call, as the template writes it, and the prompt before it.
        two: The same with two calls; None if it writes none.
    """
    left = parser(*one).content.strip()
    if not left:
        return None
    of_two = parser(*two).content.strip() if two is not None else ""
    cuts = (at for at in range(len(left), -1, -1) if of_two.startswith(left[:at]) and of_two.endswith(left[at:]))
    cut = next(cuts, len(left))
    begins, ends = left[:cut], left[cut:]
    between = of_two[cut : len(of_two) - len(ends)] if len(of_two) > len(left) else ""
    more = rf"(?:\s*{_loose(between)})*" if between.strip() else ""
    return re.compile(rf"\s*{_loose(begins)}{more}\s*{_loose(ends)}\s*")


def _loose(text: str) -> str:
    """Return a pattern for a text with any white space where it has some."""
    return r"\s*".join(map(re.escape, text.split()))


def _shows_ids(rendering: Rendering) -> bool:
    """Return whether the template writes the ids of calls.

    `Rendering` gives every call an id. So this also finds templates that refuse calls without ids.
    """
    try:
        return _IDS[0] in rendering(_conversation(_IDS[0]))
    except REFUSALS:
        return False
