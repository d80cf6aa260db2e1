"""Reads a turn's text as reasoning, content and calls: the part that all notations share.

A parser reads a turn's text. Most parsers consist of a notation, which says how one call is written, and `Scan` around
it.

Sampled text is hostile. A parser reads any text in time linear in its length and never raises. So a notation only
moves forward, and looks ahead through `CallFinder.find`, which never searches the same stretch twice.

A call inside closed reasoning is not a call, because the policy only thought of it. A call inside reasoning that is
never closed is an attempt that cannot be run, whether the policy or the prompt opened the reasoning. A reasoning tag
inside a call's arguments is part of the argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

# A turn with more calls is of no use, so the rest are not read.
MAX_CALLS = 256

_JSON = json.JSONDecoder()

_SPACE = re.compile(r"\s*")

OPENS_THOUGHT, CLOSES_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds one tool call that could be read.

    Attributes:
        name: The tool's name.
        arguments: An object. If no object could be read, the text that the policy wrote; the tools read as much of it
            as they can.
        id: The policy's id, or one in the form that the notation asks for. None if the notation has none.
        as_text: The notation writes every value as text without quotes, so text may stand for a JSON value.
    """

    name: str
    arguments: dict[str, Any] | str
    id: str | None = None
    as_text: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Holds the reason why an attempted call cannot be read. The policy gets it as the tool's answer."""

    reason: str


UNCLOSED_THOUGHT = MalformedCall("the tool call stands inside reasoning that is not closed")


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Holds a turn's text and its parts.

    Attributes:
        text: The turn without the token that ended it.
        content: The text without the reasoning and without the calls that could be read.
        calls: The calls in the order of the text. Empty if none was attempted.
        reasoning: None if the notation has none, or leaves it in the content.
    """

    text: str
    content: str
    calls: list[ToolCall | MalformedCall]
    reasoning: str | None = None

    def message(self) -> Message:
        """Return the turn as an assistant's message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        functions = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                **({} if call.id is None else {"id": call.id}),
            }
            for call in self.calls
            if isinstance(call, ToolCall)
        ]
        if functions:
            message["tool_calls"] = functions
        return message


Call = ToolCall | MalformedCall

Calls = list[Call]


@dataclass(frozen=True, slots=True)
class Before:
    """Holds the text before a turn.

    Attributes:
        tail: The end of the prompt.
        begun: The part of the turn that the prompt already contains, such as the opening of a thought.
    """

    tail: str = ""
    begun: str = ""


class Parser(Protocol):
    """Reads a turn's text, without the token that ended it. It never raises, whatever the text is."""

    def __call__(self, text: str, before: Before) -> ParsedTurn: ...


@dataclass(slots=True)
class CallFinder:
    """Searches a text from ever later positions. It searches each stretch once for each pattern."""

    text: str
    _found: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = field(default_factory=dict)

    def find(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """Find the first match from `at` on.

        Args:
            pattern: The pattern to search for.
            at: Character position. It may not be before that of an earlier search for the pattern by more than the
                match that was found.

        Returns:
            The match, or None.
        """
        if (known := self._found.get(pattern)) is not None:
            since, match = known
            if since <= at and (match is None or match.start() >= at):
                return match
        match = pattern.search(self.text, at)
        self._found[pattern] = (at, match)
        return match


class Notation(Protocol):
    """Describes how one call, or one block of calls, is written."""

    @property
    def opening(self) -> re.Pattern[str]:
        """Return the pattern of the places where a call or block may begin."""

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        """Read the block of calls that `opened` begins.

        Args:
            source: The turn's text.
            opened: The match of `opening`.

        Returns:
            The calls, and the character position where the block ends, which is after the opening. An empty list
            means that this was no call. The text of a malformed call stays in the content.
        """


def no_more(calls: Calls) -> Calls:
    """Cut the calls to the first `MAX_CALLS`, which are run.

    A malformed call at the end tells the policy that the others were not run.
    """
    if len(calls) <= MAX_CALLS:
        return calls
    return [*calls[:MAX_CALLS], MalformedCall(f"a turn may make {MAX_CALLS} tool calls; the others were not run")]


class Unreadable(ValueError):
    """Raised for text that cannot be read. The message says why.

    Attributes:
        at: Character position up to which the text could be read. That part is not searched for calls again.
    """

    def __init__(self, text: str, at: int) -> None:
        super().__init__(text)
        self.at = at


def read_json(text: str, at: int) -> tuple[Any, int]:
    """Read the JSON value that begins at `at`, after white space.

    Returns:
        The value and the character position where it ends.

    Raises:
        Unreadable: There is no JSON value there.
    """
    at = skip_space(text, at)
    try:
        value, end = _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{error.msg} at character {error.pos - at}", error.pos) from None
    except RecursionError:
        raise Unreadable("it is nested too deeply", len(text)) from None
    except ValueError as error:  # a number with thousands of digits
        raise Unreadable(str(error), len(text)) from None
    if "\\u" in text[at:end]:  # it may be half of a surrogate pair, which no tokenizer accepts
        value = json.loads(encodable(json.dumps(value, ensure_ascii=False)))
    return value, end


def encodable(text: str) -> str:
    """Replace each half of a surrogate pair in `text`, because UTF-8 cannot write it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def call_of(value: Any, arguments: tuple[str, ...] = ("arguments", "parameters"), name: str = "name") -> Call:
    """Make a call from the JSON object `{name: ..., arguments: ...}`.

    Args:
        value: The value that was read.
        arguments: Keys under which the arguments may be.
        name: Key of the tool's name.

    Returns:
        The call, or a malformed call if `value` has another form.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get(name), str):
        return MalformedCall(f'a tool call is a JSON object with "{name}" and "{arguments[0]}"')
    key = next((key for key in arguments if key in value), None)
    given = {} if key is None or value[key] is None else value[key]
    if not isinstance(given, dict | str):
        return MalformedCall(f'"{key}" must be a JSON object, is {json.dumps(given)[:80]}')
    call = value.get("id")
    return ToolCall(value[name], given, call if isinstance(call, str) else None)


def malformed(source: CallFinder, following: re.Pattern[str], at: int, why: str) -> tuple[Calls, int]:
    """Return a malformed call and the position where it ends.

    Args:
        source: The turn's text.
        following: Pattern of the next tag, with a group `close` that matches only a closing tag.
        at: Character position from which to search.
        why: The reason that the policy is told.

    Returns:
        The call, and the character position where it ends: after a closing tag, before another match, or at the end
        of the text.
    """
    found = source.find(following, at)
    if found is None:
        return [MalformedCall(why)], len(source.text)
    return [MalformedCall(why)], found.end() if found["close"] is not None else found.start()


@dataclass(frozen=True, slots=True)
class Thought:
    """Describes how reasoning is written.

    Attributes:
        opening: The opening tag.
        closing: The closing tag.
        separate: Whether reasoning is separated from the content. Otherwise it stays there.
    """

    opening: str = OPENS_THOUGHT
    closing: str = CLOSES_THOUGHT
    separate: bool = False

    def is_open(self, text: str) -> bool:
        """Return whether the text ends inside a thought."""
        return text.rfind(self.opening) > text.rfind(self.closing)


@dataclass(frozen=True, slots=True)
class Scan:
    """Parses turns in one notation, with reasoning in the tags of `thought`."""

    notation: Notation
    thought: Thought = Thought()
    _either: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        opening = self.notation.opening
        either = re.compile(
            f"(?P<slipstream_thought>{re.escape(self.thought.opening)})|{opening.pattern}", opening.flags
        )
        object.__setattr__(self, "_either", either)

    def __call__(self, text: str, before: Before) -> ParsedTurn:
        source, thought = CallFinder(text), self.thought
        thoughts: list[str] = []
        content: list[str] = []
        calls: Calls = []

        def think(start: int, inside: int) -> int:
            """Store the thought whose text begins at `inside`, and return the position where it ends."""
            end = text.find(thought.closing, inside)
            closed = end + len(thought.closing) if end >= 0 else len(text)
            if end < 0:
                calls.extend(self._unclosed(source, inside))
            thoughts.append(text[inside : end if end >= 0 else len(text)])
            if not thought.separate:
                content.append(text[start:closed])
            return closed

        reads = 0
        at = think(0, 0) if thought.is_open(before.begun) else 0
        while at < len(text):
            opened = self._either.search(text, at)
            if opened is None:
                break
            content.append(text[at : opened.start()])
            if opened["slipstream_thought"] is not None:
                at = think(opened.start(), opened.end())
                continue
            if reads >= MAX_CALLS:
                calls.append(MalformedCall(f"more than {MAX_CALLS} tool calls were begun; the others are not read"))
                at = opened.start()
                break
            reads += 1
            found, at = self.notation.read(source, opened)
            calls += found
            if not found or any(isinstance(call, MalformedCall) for call in found):
                content.append(text[opened.start() : at])
        content.append(text[at:])
        if not calls and not (thought.separate and thoughts):
            return ParsedTurn(text, text, [])
        reasoning = "\n\n".join(stripped for part in thoughts if (stripped := part.strip())) if thought.separate else ""
        return ParsedTurn(text, "".join(content).strip(), no_more(calls), reasoning or None)

    def _unclosed(self, source: CallFinder, at: int) -> Calls:
        """Return one malformed call for each call in a thought that begins at `at` and is never closed."""
        calls: Calls = []
        for _ in range(MAX_CALLS):
            opened = self.notation.opening.search(source.text, at)
            if opened is None:
                break
            found, at = self.notation.read(source, opened)
            calls += [UNCLOSED_THOUGHT] * len(found)
        return calls
