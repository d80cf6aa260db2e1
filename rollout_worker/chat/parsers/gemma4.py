"""`<|tool_call>call:name{key:value}<tool_call|>`, with strings between `<|"|>`: Gemma 4."""

from __future__ import annotations

import re

from rollout_worker.chat.base import ToolCall
from rollout_worker.chat.parsers.base import CallFinder, Calls, Unreadable, malformed, skip_space
from rollout_worker.chat.parsers.literal_calls import Literals

_CLOSES = "<tool_call|>"
_NEXT = re.compile(r"<\|tool_call>|(?P<close><tool_call\|>)")
_NAME = re.compile(r"\s*call:([\w.-]{1,256})\s*(?=\{)")
_LITERALS = Literals(quote='<|"|>', bare_keys=re.compile(r"[\w.-]{1,256}"))


class _Gemma4:
    opening = re.compile(r"<\|tool_call>")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        text = source.text
        try:
            named = _NAME.match(text, opened.end())
            if named is None:
                raise Unreadable("it names no function", opened.end())
            arguments, end = _LITERALS.read(text, named.end())
            end = skip_space(text, end)
            if not text.startswith(_CLOSES, end):
                raise Unreadable(f"{_CLOSES} does not follow the arguments", end)
        except Unreadable as error:
            return malformed(
                source,
                _NEXT,
                error.at,
                f"the tool call is not of the form {opened[0]}call:name{{key:value}}{_CLOSES}: {error}",
            )
        return [ToolCall(named[1], arguments)], end + len(_CLOSES)


NOTATION = _Gemma4()
