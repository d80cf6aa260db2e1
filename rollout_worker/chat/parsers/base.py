"""What reads a turn's text: a parser. Most are a notation, which says how one call is written, and the scan around it.

Sampled text is hostile: whatever it is, it is read in time linear in its length, and nothing raises. A notation moves
forward only, and looks ahead through `Source.find`, which never searches the same stretch twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_worker.chat.base import MalformedCall, ParsedTurn, ToolCall

# A turn with more of them is no use to anybody: no more are read.
MOST_CALLS = 256

Call = ToolCall | MalformedCall

Calls = list[Call]


@dataclass(frozen=True, slots=True)
class Before:
    """What stands before a turn. tail: the end of the prompt; said: what of the turn is in the prompt already, such as
    the opening of a thought."""

    tail: str = ""
    said: str = ""


class Parser(Protocol):
    """Reads a turn's text, without the token that ended it. Raises nothing, whatever the text is."""

    def __call__(self, text: str, before: Before) -> ParsedTurn: ...


@dataclass(slots=True)
class CallFinder:
    """A text that is searched from ever later positions, each stretch once for each pattern."""

    text: str
    _found: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = field(default_factory=dict)

    def find(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """The first match from `at` on; `at` may not be before that of an earlier search for the pattern by more than
        the match that was found."""
        if (known := self._found.get(pattern)) is not None:
            since, match = known
            if since <= at and (match is None or match.start() >= at):
                return match
        match = pattern.search(self.text, at)
        self._found[pattern] = (at, match)
        return match


class Notation(Protocol):
    """How one call, or one block of calls, is written."""

    @property
    def opening(self) -> re.Pattern[str]:
        """Where one may begin."""

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        """The calls of the block that `opened` begins, and where it ends, after the opening. No calls: it was none.
        A malformed call's text stays in the content."""


def no_more(calls: Calls) -> Calls:
    """The calls, cut to those that are run, with what the policy is told of the others."""
    if len(calls) <= MOST_CALLS:
        return calls
    return [*calls[:MOST_CALLS], MalformedCall(f"a turn may make {MOST_CALLS} tool calls; the others were not run")]


class Unreadable(ValueError):
    """The text says why; `at`: how far it could be read. What was read is not searched for calls again."""

    def __init__(self, text: str, at: int) -> None:
        super().__init__(text)
        self.at = at


_JSON = json.JSONDecoder()


def read_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at`, after white space, and where it ends. Raises `Unreadable`."""
    at = skip_space(text, at)
    try:
        value, end = _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{error.msg} at character {error.pos - at}", error.pos) from None
    except RecursionError:
        raise Unreadable("it is nested too deeply", len(text)) from None
    except ValueError as error:  # a number of thousands of digits
        raise Unreadable(str(error), len(text)) from None
    if "\\u" in text[at:end]:  # half of a surrogate pair, which no tokenizer takes
        value = json.loads(encodable(json.dumps(value, ensure_ascii=False)))
    return value, end


def encodable(text: str) -> str:
    """`text` with what UTF-8 cannot write, half of a surrogate pair, replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_SPACE = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def call_of(value: Any, arguments: tuple[str, ...] = ("arguments", "parameters"), name: str = "name") -> Call:
    """A call from the JSON object `{name: ..., arguments: ...}`."""
    if not isinstance(value, Mapping) or not isinstance(value.get(name), str):
        return MalformedCall(f'a tool call is a JSON object with "{name}" and "{arguments[0]}"')
    key = next((key for key in arguments if key in value), None)
    given = {} if key is None or value[key] is None else value[key]
    if not isinstance(given, dict | str):
        return MalformedCall(f'"{key}" must be a JSON object, is {json.dumps(given)[:80]}')
    call = value.get("id")
    return ToolCall(value[name], given, call if isinstance(call, str) else None)


def malformed(source: CallFinder, following: re.Pattern[str], at: int, why: str) -> tuple[Calls, int]:
    """A malformed call, and where it ends: where `following` next matches from `at` on, after it if its group `close`
    does, or at the end of the text."""
    found = source.find(following, at)
    if found is None:
        return [MalformedCall(why)], len(source.text)
    return [MalformedCall(why)], found.end() if found["close"] is not None else found.start()
