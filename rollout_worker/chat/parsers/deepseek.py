"""DeepSeek's calls between tags of their own: V3 and R1 put type, name and a fenced object, V3.1 name and object."""

from __future__ import annotations

import re

from rollout_worker.chat.base import MalformedCall, ToolCall
from rollout_worker.chat.parsers.base import CallFinder, Calls, Unreadable, malformed, read_json, skip_space

_CLOSES = "<｜tool▁call▁end｜>"
_NEXT = re.compile("<｜tool▁call▁begin｜>|(?P<close><｜tool▁call▁end｜>)")
_NAMED = re.compile(r"(?:function<｜tool▁sep｜>)?\s*([\w.-]{1,256})\s*(?:<｜tool▁sep｜>|\n)\s*(?:```json)?")
_FENCE = re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")


class _DeepSeek:
    opening = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        named = _NAMED.match(source.text, opened.end())
        if named is None:
            return malformed(source, _NEXT, opened.end(), "the tool call names no function")
        try:
            value, end = read_json(source.text, skip_space(source.text, named.end()))
        except Unreadable as error:
            return malformed(source, _NEXT, error.at, f"the tool call's arguments are not valid JSON: {error}")
        closed = _FENCE.match(source.text, end)
        if closed is None:
            return malformed(source, _NEXT, end, f"{_CLOSES} does not follow the tool call's arguments")
        if not isinstance(value, dict | str):
            return [MalformedCall("the tool call's arguments must be a JSON object")], closed.end()
        return [ToolCall(named[1], value)], closed.end()


NOTATION = _DeepSeek()
