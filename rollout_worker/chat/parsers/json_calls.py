"""Calls as JSON between two tags: one object, or a list of them."""

from __future__ import annotations

import re

from rollout_worker.chat.base import MalformedCall
from rollout_worker.chat.parsers.base import CallFinder, Calls, Unreadable, call_of, read_json, skip_space


class TaggedJson:
    """`opens` and `closes` are the tags; `arguments` and `name` the keys. stray: a closing tag alone is a call that
    went wrong, where that tag is never ordinary text.

    The policy is told without the tags: they are special tokens, which no text may hold.
    """

    def __init__(
        self,
        opens: str,
        closes: str,
        *,
        arguments: tuple[str, ...] = ("arguments", "parameters"),
        name: str = "name",
        stray: bool = True,
    ) -> None:
        self._opens, self._closes = opens, closes
        self._arguments, self._name = arguments, name
        tags = re.escape(opens) + (f"|(?P<stray>{re.escape(closes)})" if stray else "(?P<stray>(?!))")
        self.opening = re.compile(tags)
        self._next = re.compile(f"{re.escape(opens)}|(?P<close>{re.escape(closes)})")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        if opened["stray"] is not None:
            return [MalformedCall("a tool call is closed that was not opened")], opened.end()
        try:
            value, end = read_json(source.text, opened.end())
        except Unreadable as error:
            return self._malformed(source, error.at, f"the tool call is not valid JSON: {error}")
        end = skip_space(source.text, end)
        if not source.text.startswith(self._closes, end):
            return self._malformed(source, end, "the closing tag does not follow the tool call's JSON")
        values = value if isinstance(value, list) and value else [value]
        return [call_of(each, self._arguments, self._name) for each in values], end + len(self._closes)

    def _malformed(self, source: CallFinder, at: int, why: str) -> tuple[Calls, int]:
        """Up to the closing tag, or the next opening one."""
        following = source.find(self._next, at)
        if following is None or following["close"] is None:
            end = len(source.text) if following is None else following.start()
            return [MalformedCall(f"the tool call is not closed: {why}")], end
        return [MalformedCall(why)], following.end()
