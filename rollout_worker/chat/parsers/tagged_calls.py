"""Calls as tags around each value: a name, then pairs of key and value, all as text.

A value is text as the policy wrote it: what type it should have, the tool's schema says, and the tools read it so. Its
end is the closing tag that more of the call follows, so that a value may hold tags itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollout_worker.chat.base import MalformedCall, ToolCall
from rollout_worker.chat.parsers.base import CallFinder, Calls, encodable, skip_space


@dataclass(frozen=True, slots=True)
class TaggedValues:
    """opening: of a call or block; name: matches after the opening, with a group `name`; key: before a value, with a
    group `key`; ends_value: the closing tag, with a lookahead for what follows; closing: of a call; shape: as the
    policy is told; lines: a value stands on lines of its own, whose breaks are not part of it."""

    opening: re.Pattern[str]
    name: re.Pattern[str]
    key: re.Pattern[str]
    ends_value: re.Pattern[str]
    closing: re.Pattern[str]
    shape: str
    lines: bool = False

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        text = source.text
        named = self.name.match(text, opened.end())
        if named is None:
            return self._malformed(source, opened.end(), "it names no function")
        at, arguments = skip_space(text, named.end()), {}
        while (key := self.key.match(text, at)) is not None:
            ended = source.find(self.ends_value, key.end())
            if ended is None:
                return self._malformed(source, key.end(), f"the value of {key['key'].strip()[:80]!r} is not closed")
            value = text[key.end() : ended.start()]
            arguments[encodable(key["key"].strip())] = _without_line_breaks(value) if self.lines else value
            at = skip_space(text, ended.end())
        closed = self.closing.match(text, at)
        if closed is None:
            return self._malformed(source, at, f"it goes on with {text[at : at + 40]!r}")
        return [ToolCall(encodable(named["name"].strip()), arguments)], closed.end()

    def _malformed(self, source: CallFinder, at: int, why: str) -> tuple[Calls, int]:
        """Up to where it closes, or the next one opens."""
        closing, following = source.find(self.closing, at), source.find(self.opening, at)
        end = len(source.text)
        if following is not None:
            end = following.start()
        if closing is not None and closing.start() <= end:
            end = closing.end()
        return [MalformedCall(f"the tool call is not of the form {self.shape}: {why}")], end


def _without_line_breaks(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")
