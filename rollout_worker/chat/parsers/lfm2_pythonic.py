"""`<|tool_call_start|>[name(key=value), ...]<|tool_call_end|>`: LFM2 and LFM2.5."""

from __future__ import annotations

import re
from typing import Any

from rollout_worker.chat.base import ToolCall
from rollout_worker.chat.parsers.base import CallFinder, Calls, Unreadable, malformed, skip_space
from rollout_worker.chat.parsers.literal_calls import Literals

_CLOSES = "<|tool_call_end|>"
_NEXT = re.compile(r"<\|tool_call_start\|>|(?P<close><\|tool_call_end\|>)")
_NAME = re.compile(r"\s*([\w.-]{1,256})\(\s*")
_KEY = re.compile(r"\s*(\w{1,256})\s*=")
_LITERALS = Literals()


class _Lfm2Pythonic:
    opening = re.compile(r"<\|tool_call_start\|>")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        text = source.text
        try:
            calls, end = _list_of_calls(text, skip_space(text, opened.end()))
            end = skip_space(text, end)
            if not text.startswith(_CLOSES, end):
                raise Unreadable(f"{_CLOSES} does not follow the calls", end)
        except Unreadable as error:
            return malformed(
                source,
                _NEXT,
                error.at,
                f"the tool call is not of the form {opened[0]}[name(key=value)]{_CLOSES}: {error}",
            )
        return calls, end + len(_CLOSES)


def _list_of_calls(text: str, at: int) -> tuple[Calls, int]:
    bracket = text.startswith("[", at)
    at += bracket
    calls: Calls = []
    while (named := _NAME.match(text, at)) is not None:
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
        arguments[key[1]], at = _LITERALS.read(text, key.end())
        at = skip_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(")", at):
            raise Unreadable(f"expected , or ), found {text[at : at + 20]!r}", at)
    return arguments, at + 1


NOTATION = _Lfm2Pythonic()
