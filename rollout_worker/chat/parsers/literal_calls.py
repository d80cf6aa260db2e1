"""Reads the notations whose values are Python or JSON literals, or a dialect between the two.

Chat templates produce such dialects. `Literals` reads them without `ast`: sampled text may nest deeper than the parser
of `ast` survives, and templates leave quotes and line breaks inside strings as they are.

- Gemma 4: `<|tool_call>call:name{key:value}<tool_call|>`, with strings between `<|"|>`.
- LFM2 and LFM2.5: `<|tool_call_start|>[name(key=value), ...]<|tool_call_end|>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from slipstream.rollout_worker.chat.parsers.base import (
    CallFinder,
    Calls,
    ToolCall,
    Unreadable,
    encodable,
    malformed,
    skip_space,
)

_DEEPEST = 64

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}

_WORD = re.compile(r"[A-Za-z]{4,5}(?!\w)")

_NUMBER = re.compile(r"-?\d{1,400}(?:(\.\d{0,400})?([eE][+-]?\d{1,4})?)(?![\w.])")

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)

_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0", "\n": ""}

# A mark is an escape in a string, or the quote that ends it. Templates leave quotes inside strings unescaped. So a
# quote ends the string only before a comma, a colon, a closing bracket or the end of the text.
_MARKS = {quote: re.compile(rf"\\.|{quote}(?=\s*(?:[,:)\]}}]|$))", re.DOTALL) for quote in ("'", '"')}

_GEMMA_CLOSES = "<tool_call|>"

_GEMMA_NEXT = re.compile(r"<\|tool_call>|(?P<close><tool_call\|>)")

_GEMMA_NAME = re.compile(r"\s*call:([\w.-]{1,256})\s*(?=\{)")

_LFM2_CLOSES = "<|tool_call_end|>"

_LFM2_NEXT = re.compile(r"<\|tool_call_start\|>|(?P<close><\|tool_call_end\|>)")

_LFM2_NAME = re.compile(r"\s*([\w.-]{1,256})\(\s*")

_KEY = re.compile(r"\s*(\w{1,256})\s*=")


@dataclass(frozen=True, slots=True)
class Literals:
    """Reads values in the notation of Python or JSON.

    Attributes:
        quote: A further string delimiter. Its strings have no escapes.
        bare_keys: Pattern of an object's keys that may stand without quotes.
    """

    quote: str | None = None
    bare_keys: re.Pattern[str] | None = None

    def read(self, text: str, at: int, depth: int = 0) -> tuple[Any, int]:
        """Read the value that begins at `at`, after white space.

        Args:
            text: The turn's text.
            at: Character position.
            depth: Number of values around this one. More than 64 are an error.

        Returns:
            The value and the character position where it ends.

        Raises:
            Unreadable: There is no value there, or it is nested too deeply.
        """
        if depth > _DEEPEST:
            raise Unreadable("it is nested too deeply", at)
        at = skip_space(text, at)
        first = text[at : at + 1]
        if first == "{":
            return self._object(text, at + 1, depth)
        if first and first in "[(":
            return self._list(text, at + 1, "]" if first == "[" else ")", depth)
        if self.quote is not None and text.startswith(self.quote, at):
            begin = at + len(self.quote)
            end = text.find(self.quote, begin)
            if end < 0:
                raise Unreadable(f"{self.quote} is not closed", begin)
            return text[begin:end], end + len(self.quote)
        if first and first in "'\"":
            return _string(text, at)
        return _word_or_number(text, at)

    def _list(self, text: str, at: int, closing: str, depth: int) -> tuple[list[Any], int]:
        values = []
        while not text.startswith(closing, at := skip_space(text, at)):
            value, at = self.read(text, at, depth + 1)
            values.append(value)
            at = _separator(text, at, closing)
        return values, at + 1

    def _object(self, text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
        values = {}
        while not text.startswith("}", at := skip_space(text, at)):
            bare = self.bare_keys.match(text, at) if self.bare_keys is not None else None
            key, at = (bare[0], bare.end()) if bare is not None else self.read(text, at, depth + 1)
            at = skip_space(text, at)
            if not text.startswith(":", at):
                raise Unreadable(f"a colon is missing before {text[at : at + 20]!r}", at)
            value, at = self.read(text, at + 1, depth + 1)
            values[key if isinstance(key, str) else str(key)] = value
            at = _separator(text, at, "}")
        return values, at + 1


def _separator(text: str, at: int, closing: str) -> int:
    """Return the position after a comma, or before the closing bracket."""
    at = skip_space(text, at)
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(closing, at):
        raise Unreadable(f"expected , or {closing}, found {text[at : at + 20]!r}", at)
    return at


def _word_or_number(text: str, at: int) -> tuple[Any, int]:
    word = _WORD.match(text, at)
    if word is not None and word[0] in _WORDS:
        return _WORDS[word[0]], word.end()
    number = _NUMBER.match(text, at)
    if number is None:
        raise Unreadable(f"expected a value, found {text[at : at + 20]!r}", at)
    whole = number[1] is None and number[2] is None
    return (int(number[0]) if whole else float(number[0])), number.end()


def _string(text: str, at: int) -> tuple[str, int]:
    marks = _MARKS[text[at]].finditer(text, at + 1)
    end = next((mark.start() for mark in marks if mark[0][0] == text[at]), None)
    if end is None:
        raise Unreadable(f"a string that begins with {text[at]} is not closed", len(text))
    inside = text[at + 1 : end]
    return (encodable(_ESCAPE.sub(_unescaped, inside)) if "\\" in inside else inside), end + 1


def _unescaped(escape: re.Match[str]) -> str:
    if (code := escape[1] or escape[2]) is not None:
        return chr(int(code, 16))
    return _ESCAPED.get(escape[3], escape[3])


_GEMMA_LITERALS = Literals(quote='<|"|>', bare_keys=re.compile(r"[\w.-]{1,256}"))


class _Gemma4:
    opening = re.compile(r"<\|tool_call>")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        text = source.text
        try:
            named = _GEMMA_NAME.match(text, opened.end())
            if named is None:
                raise Unreadable("it names no function", opened.end())
            arguments, end = _GEMMA_LITERALS.read(text, named.end())
            end = skip_space(text, end)
            if not text.startswith(_GEMMA_CLOSES, end):
                raise Unreadable(f"{_GEMMA_CLOSES} does not follow the arguments", end)
        except Unreadable as error:
            return malformed(
                source,
                _GEMMA_NEXT,
                error.at,
                f"the tool call is not of the form {opened[0]}call:name{{key:value}}{_GEMMA_CLOSES}: {error}",
            )
        return [ToolCall(named[1], arguments)], end + len(_GEMMA_CLOSES)


GEMMA4 = _Gemma4()


_LFM2_LITERALS = Literals()


class _Lfm2Pythonic:
    opening = re.compile(r"<\|tool_call_start\|>")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        text = source.text
        try:
            calls, end = _list_of_calls(text, skip_space(text, opened.end()))
            end = skip_space(text, end)
            if not text.startswith(_LFM2_CLOSES, end):
                raise Unreadable(f"{_LFM2_CLOSES} does not follow the calls", end)
        except Unreadable as error:
            return malformed(
                source,
                _LFM2_NEXT,
                error.at,
                f"the tool call is not of the form {opened[0]}[name(key=value)]{_LFM2_CLOSES}: {error}",
            )
        return calls, end + len(_LFM2_CLOSES)


def _list_of_calls(text: str, at: int) -> tuple[Calls, int]:
    bracket = text.startswith("[", at)
    at += bracket
    calls: Calls = []
    while (named := _LFM2_NAME.match(text, at)) is not None:
        arguments, at = _arguments(text, named.end())
        calls.append(ToolCall(named[1], arguments))
        at = skip_space(text, at)
        if not text.startswith(",", at):
            break
        at += 1
    at = skip_space(text, at)
    if not calls:
        raise Unreadable("it names no function", at)
    if bracket and not text.startswith("]", at):
        raise Unreadable(f"expected , or ], found {text[at : at + 20]!r}", at)
    return calls, at + bracket


def _arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    while not text.startswith(")", at := skip_space(text, at)):
        key = _KEY.match(text, at)
        if key is None:
            raise Unreadable(f"an argument is key=value, not {text[at : at + 20]!r}", at)
        arguments[key[1]], at = _LFM2_LITERALS.read(text, key.end())
        at = skip_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(")", at):
            raise Unreadable(f"expected , or ), found {text[at : at + 20]!r}", at)
    return arguments, at + 1


LFM2_PYTHONIC = _Lfm2Pythonic()
