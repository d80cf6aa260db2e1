"""What reads a turn's text: a parser. Most are a notation, which says how one call is written, and the scan around it.

Sampled text is hostile: whatever it is, it is read in time linear in its length, and nothing raises. A notation moves
forward only, and looks ahead through `Source.find`, which never searches the same stretch twice.

A turn's text as reasoning, content and calls: what is common to all notations.

What the policy only thought of is not a call. In a thought that is never closed, whether the policy or the prompt
opened it, it is an attempt that cannot be run. And a tag of thought inside a call's arguments is an argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: an object, or the text that the policy wrote where no object could be read from it: the tools read
    what can be read. id: the policy's, or as the notation asks for one; None where it knows none."""

    name: str
    arguments: dict[str, Any] | str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An attempted call that cannot be read; the policy is told the reason."""

    reason: str


UNCLOSED_THOUGHT = MalformedCall("the tool call stands inside reasoning that is not closed")


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """text: the turn without the token that ended it; content: the text without the calls that could be read and
    without the reasoning; calls: in the order of the text, empty where none was attempted; reasoning: None where the
    notation has none, or leaves it in the content."""

    text: str
    content: str
    calls: list[ToolCall | MalformedCall]
    reasoning: str | None = None

    def message(self) -> Message:
        """The turn as an assistant's message."""
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


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

# A turn with more of them is no use to anybody: no more are read.
MAX_CALLS = 256

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
    if len(calls) <= MAX_CALLS:
        return calls
    return [*calls[:MAX_CALLS], MalformedCall(f"a turn may make {MAX_CALLS} tool calls; the others were not run")]


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


OPENS_THOUGHT, CLOSES_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thought:
    """How reasoning is written. told: it is told from the content; else it stays in it."""

    opening: str = OPENS_THOUGHT
    closing: str = CLOSES_THOUGHT
    told: bool = False

    def is_open(self, said: str) -> bool:
        """Does what was said end inside a thought?"""
        return said.rfind(self.opening) > said.rfind(self.closing)


@dataclass(frozen=True, slots=True)
class Scan:
    """A parser of one notation."""

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
            """Takes the thought whose text begins at `inside`; where it ends."""
            end = text.find(thought.closing, inside)
            closed = end + len(thought.closing) if end >= 0 else len(text)
            if end < 0:
                calls.extend(self._unclosed(source, inside))
            thoughts.append(text[inside : end if end >= 0 else len(text)])
            if not thought.told:
                content.append(text[start:closed])
            return closed

        reads = 0
        at = think(0, 0) if thought.is_open(before.said) else 0
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
        if not calls and not (thought.told and thoughts):
            return ParsedTurn(text, text, [])
        reasoning = "\n\n".join(stripped for part in thoughts if (stripped := part.strip())) if thought.told else ""
        return ParsedTurn(text, "".join(content).strip(), no_more(calls), reasoning or None)

    def _unclosed(self, source: CallFinder, at: int) -> Calls:
        """What becomes of the calls in a thought that begins at `at` and is never closed."""
        calls: Calls = []
        for _ in range(MAX_CALLS):
            opened = self.notation.opening.search(source.text, at)
            if opened is None:
                break
            found, at = self.notation.read(source, opened)
            calls += [UNCLOSED_THOUGHT] * len(found)
        return calls
