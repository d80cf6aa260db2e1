"""`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2. The part before the
object is the call's id."""

from __future__ import annotations

import re

from rollout_worker.chat.base import MalformedCall, ToolCall
from rollout_worker.chat.parsers.base import CallFinder, Calls, Unreadable, malformed, read_json, skip_space

_CLOSES = "<|tool_call_end|>"
_NEXT = re.compile(r"<\|tool_call_begin\|>|(?P<close><\|tool_call_end\|>)")
_NAMED = re.compile(r"\s*((?:functions\.)?([\w.-]{1,256})(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>")
_END_OF_SECTION = re.compile(r"\s*<\|tool_calls_section_end\|>")


class _Kimi:
    opening = re.compile(r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        named = _NAMED.match(source.text, opened.end())
        if named is None:
            return malformed(source, _NEXT, opened.end(), "the tool call names no function")
        try:
            value, end = read_json(source.text, named.end())
        except Unreadable as error:
            return malformed(source, _NEXT, error.at, f"the tool call's arguments are not valid JSON: {error}")
        end = skip_space(source.text, end)
        if not source.text.startswith(_CLOSES, end):
            return malformed(source, _NEXT, end, f"{_CLOSES} does not follow the tool call's arguments")
        end += len(_CLOSES)
        if (section := _END_OF_SECTION.match(source.text, end)) is not None:
            end = section.end()
        if not isinstance(value, dict | str):
            return [MalformedCall("the tool call's arguments must be a JSON object")], end
        return [ToolCall(named[2], value, named[1])], end


NOTATION = _Kimi()
