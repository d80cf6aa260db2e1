"""Which parser reads a template's calls: the one that reads back what the template itself wrote."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.config import ConfigError
from rollout_worker.chat.base import Message, ToolCall
from rollout_worker.chat.parsers import NAMES, Before, Parser, Thought, by_name
from rollout_worker.chat.parsers.custom import load_own
from rollout_worker.chat.parsers.response_template import ResponseTemplate
from rollout_worker.chat.rendering import Rendering
from rollout_worker.chat.sameness import same_value
from rollout_worker.chat.template_analysis import REFUSALS, USER, Unfit

# A call's id is nine letters and digits to some, and its name and place in the turn to others.
_IDS = ("slip7f3a9", "functions.slipstream_tool:0")

ARGUMENTS: dict[str, Any] = {"number": 7, "text": "plain words"}


@dataclass(frozen=True, slots=True)
class ParserMatch:
    """shows_ids: the template writes the ids of calls, or asks for them."""

    name: str
    parser: Parser
    rendering: Rendering
    shows_ids: bool


def choose_parser(setting: str, rendering: Rendering, stops: Sequence[str], thought: Thought, end: str) -> ParserMatch:
    """The parser that `setting`, a name of `chat.parser`, stands for. Raises `ConfigError` if there is none such, and
    `Unfit` if `auto` finds none that reads the template's calls."""
    shows_ids = _shows_ids(rendering)
    candidates = list(_candidates(setting, rendering, thought, end))
    others = rendering.but(arguments_as_text=not rendering.arguments_as_text)
    for tried, an_id in itertools.product((rendering, others), _IDS):
        written = _written_call(tried, stops, an_id)
        if written is None:
            continue
        for name, parser in candidates:
            if _reads_back(parser, *written):
                return ParserMatch(name, parser, tried, shows_ids)
    if setting != "auto":  # named by somebody who may know better: the start check says what it cannot do
        (name, parser), *_ = candidates
        return ParserMatch(name, parser, rendering, shows_ids)
    if _written_call(rendering, stops, _IDS[0]) is None:
        raise Unfit("it leaves out the tool calls that the assistant makes, so that no notation can be told")
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


def _conversation(an_id: str) -> list[Message]:
    call = {"type": "function", "id": an_id, "function": {"name": "slipstream_tool", "arguments": ARGUMENTS}}
    answer = {"role": "tool", "name": "slipstream_tool", "tool_call_id": an_id, "content": "a result"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]


def _written_call(rendering: Rendering, stops: Sequence[str], an_id: str) -> tuple[str, Before] | None:
    """A turn with a call as the template writes it, and the prompt before it; None where it writes none."""
    try:
        text, prompt = rendering(_conversation(an_id)), rendering([USER])
    except REFUSALS:
        return None
    shared = next((place for place, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(prompt))
    if shared < len(prompt):  # at an empty thought that is left out: the two may share the beginning of their tags
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


def _shows_ids(rendering: Rendering) -> bool:
    """A template that refuses calls without ids is found by the ids that `Rendering` gives them all."""
    try:
        return _IDS[0] in rendering(_conversation(_IDS[0]))
    except REFUSALS:
        return False
