"""Reads the notations whose arguments are JSON. Most write one object, or a list of objects, between two tags.

- Cohere, Command R7B and A:
  `<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": ...}]<|END_ACTION|>`.
- DeepSeek: each call between DeepSeek's own tags. V3 and R1 write type, name and a fenced object; V3.1 writes name and
  object.
- Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.
  https://huggingface.co/docs/transformers/chat_extras
- Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`. The part before the
  object is the call's id.
- Llama 3.1, 3.2 and 3.3: `{"name": ..., "parameters": ...}` with nothing around it. An object with other keys, or
  without an object of parameters, is an answer in JSON, not a call.
- Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}]`. Since its eleventh tokenizer it writes
  `[TOOL_CALLS]name[ARGS]{...}`, with a tag for each call. An id is nine letters and digits.
- Nemotron before Nemotron 3: `<TOOLCALL>[{"name": ..., "arguments": ...}]</TOOLCALL>`. Nemotron 3 writes qwen3_xml.
- Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": ...}]<|/tool_call|>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from slipstream.rollout_worker.chat.parsers.base import (
    Call,
    CallFinder,
    Calls,
    MalformedCall,
    ToolCall,
    Unreadable,
    call_of,
    malformed,
    read_json,
    skip_space,
)

_KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})

_BEGINS_A_CALL = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"'
)

_MISTRAL_NAMED = re.compile(r"\s*([\w.-]{1,256})\s*(?:\[CALL_ID\]\s*(\w{1,64})\s*)?(?:\[ARGS\])?\s*(?=\{)")

_ID = re.compile(r"[A-Za-z0-9]{9}")


class TaggedJson:
    """Reads calls that are JSON between two tags.

    Messages to the policy do not quote the tags, because they are special tokens, which no text may contain.

    Args:
        opens: The opening tag.
        closes: The closing tag.
        arguments: Keys under which the arguments may be.
        name: Key of the tool's name.
    """

    def __init__(
        self,
        opens: str,
        closes: str,
        *,
        arguments: tuple[str, ...] = ("arguments", "parameters"),
        name: str = "name",
    ) -> None:
        self._opens, self._closes = opens, closes
        self._arguments, self._name = arguments, name
        # A closing tag alone counts as a malformed call.
        self.opening = re.compile(f"{re.escape(opens)}|(?P<stray>{re.escape(closes)})")
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
        """Return a malformed call that ends after the closing tag, or before the next opening one."""
        following = source.find(self._next, at)
        if following is None or following["close"] is None:
            end = len(source.text) if following is None else following.start()
            return [MalformedCall(f"the tool call is not closed: {why}")], end
        return [MalformedCall(why)], following.end()


COHERE = TaggedJson("<|START_ACTION|>", "<|END_ACTION|>", arguments=("parameters",), name="tool_name")


@dataclass(frozen=True, slots=True)
class NamedJson:
    """Reads calls that write the tool's name before an object with the arguments alone.

    Attributes:
        opening: Matches the tags before the name.
        named: Matches all between `opening` and the object, with a group `name`, and `id` where the policy writes one.
        closing: Matches all that follows the object.
        following: Matches the next opening tag, or the closing tag as a group `close`.
        closes: The closing tag as messages to the policy show it.
    """

    opening: re.Pattern[str]
    named: re.Pattern[str]
    closing: re.Pattern[str]
    following: re.Pattern[str]
    closes: str

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        named = self.named.match(source.text, opened.end())
        if named is None:
            return malformed(source, self.following, opened.end(), "the tool call names no function")
        try:
            value, end = read_json(source.text, named.end())
        except Unreadable as error:
            return malformed(source, self.following, error.at, f"the tool call's arguments are not valid JSON: {error}")
        closed = self.closing.match(source.text, end)
        if closed is None:
            why = f"{self.closes} does not follow the tool call's arguments"
            return malformed(source, self.following, end, why)
        if not isinstance(value, dict | str):
            return [MalformedCall("the tool call's arguments must be a JSON object")], closed.end()
        return [ToolCall(named["name"], value, named.groupdict().get("id"))], closed.end()


DEEPSEEK = NamedJson(
    opening=re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"),
    named=re.compile(r"(?:function<｜tool▁sep｜>)?\s*(?P<name>[\w.-]{1,256})\s*(?:<｜tool▁sep｜>|\n)\s*(?:```json)?"),
    closing=re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?"),
    following=re.compile("<｜tool▁call▁begin｜>|(?P<close><｜tool▁call▁end｜>)"),
    closes="<｜tool▁call▁end｜>",
)

HERMES = TaggedJson("<tool_call>", "</tool_call>")

KIMI = NamedJson(
    opening=re.compile(r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>"),
    named=re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]{1,256})(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>"
    ),
    closing=re.compile(r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?"),
    following=re.compile(r"<\|tool_call_begin\|>|(?P<close><\|tool_call_end\|>)"),
    closes="<|tool_call_end|>",
)


class _Llama3Json:
    opening = re.compile(r'<\|python_tag\|>\s*(?=\{)|\{(?=\s*"(?:name|type)"\s*:)')

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        tagged = opened[0] != "{"
        begin = opened.end() if tagged else opened.start()
        try:
            value, end = read_json(source.text, begin)
        except Unreadable as error:
            if tagged or _BEGINS_A_CALL.match(source.text, begin):
                return [MalformedCall(f"the tool call is not valid JSON: {error}")], max(opened.end(), error.at)
            return [], max(opened.end(), error.at)
        if isinstance(value, dict) and (tagged or _is_call(value)):
            return [call_of(value, ("parameters", "arguments"))], end
        return [], opened.end() if tagged else end


def _is_call(value: dict[str, Any]) -> bool:
    """Return whether an object with nothing around it is a call: an answer in JSON may have a name too."""
    if "name" not in value or not set(value) <= _KEYS or value.get("type", "function") != "function":
        return False
    given = value.get("parameters", value.get("arguments", ""))
    return given is None or isinstance(given, dict) or (isinstance(given, str) and given.lstrip().startswith("{"))


LLAMA3_JSON = _Llama3Json()


class _Mistral:
    opening = re.compile(r"\[TOOL_CALLS\]")

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        named = _MISTRAL_NAMED.match(source.text, opened.end())
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


MISTRAL = _Mistral()

NEMOTRON_JSON = TaggedJson("<TOOLCALL>", "</TOOLCALL>")

PHI4 = TaggedJson("<|tool_call|>", "<|/tool_call|>")
