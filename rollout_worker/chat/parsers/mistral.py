"""Mistral's two: `[TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}]`, and since its eleventh tokenizer
`[TOOL_CALLS]name[ARGS]{...}` with a tag for each call. An id is nine letters and digits."""

from __future__ import annotations

import re

from rollout_worker.chat.base import MalformedCall, ToolCall
from rollout_worker.chat.parsers.base import Call, CallFinder, Calls, Unreadable, call_of, read_json, skip_space

_NAMED = re.compile(r"\s*([\w.-]{1,256})\s*(?:\[CALL_ID\]\s*(\w{1,64})\s*)?(?:\[ARGS\])?\s*(?=\{)")
_ID = re.compile(r"[A-Za-z0-9]{9}")


class _Mistral:
    opening = re.compile(r"\[TOOL_CALLS\]")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        named = _NAMED.match(source.text, opened.end())
        try:
            value, end = read_json(source.text, opened.end() if named is None else named.end())
        except Unreadable as error:
            following = source.find(self.opening, error.at)
            end = len(source.text) if following is None else following.start()
            return [MalformedCall(f"the tool call is not valid JSON: {error}")], end
        if named is not None:
            return [ToolCall(named[1], value, _id(named[2]))], end
        values = value if isinstance(value, list) else [value]
        return [_call(each) for each in values], skip_space(source.text, end)


def _call(value: object) -> Call:
    call = call_of(value)
    return call if isinstance(call, MalformedCall) else ToolCall(call.name, call.arguments, _id(call.id))


def _id(given: str | None) -> str | None:
    return given if given is not None and _ID.fullmatch(given) else None


NOTATION = _Mistral()
