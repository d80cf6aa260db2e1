"""Calls as tags around each value: a name, then pairs of key and value, all as text.

A value is text as the policy wrote it: what type it should have, the tool's schema says, and the tools read it so. Its
end is the closing tag that more of the call follows, so that a value may hold tags itself.

A turn that is several messages, each with a header that says to whom it is: what harmony and ATEM have in common.

ATEM of Muse Glimmer: a message to `self` is reasoning, one to a tool holds
`<atem:invoke name="..."><atem:parameter name="...">value</atem:parameter></atem:invoke>`, one to `user` is content.

`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and on.

OpenAI's harmony: a message on the analysis channel is reasoning, one to `functions.name` a call, others content.

https://cookbook.openai.com/articles/openai-harmony

`<minimax:tool_call><invoke name="..."><parameter name="...">value</parameter></invoke></minimax:tool_call>`:
MiniMax M2. The outer tags may hold several.

`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5 and on,
Nemotron 3. Some of them leave the outer tag out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rollout_worker.chat.parsers.base import (
    Before,
    Call,
    CallFinder,
    Calls,
    MalformedCall,
    ParsedTurn,
    ToolCall,
    Unreadable,
    encodable,
    no_more,
    read_json,
    skip_space,
)


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


# A header is short; a longer one is text.
_HEADER = re.compile(r"(?:<\|start\|>)?([^<]{0,300}(?:<\|(?:channel|constrain)\|>[^<]{0,300}){0,3})<\|message\|>")

_MESSAGE = "<|message|>"

_END = re.compile(r"<\|(?:end|eom|eot|call|return)\|>|(?=<\|start\|>)")


@dataclass(frozen=True, slots=True)
class Block:
    """closed: it is followed by a tag that ends it."""

    header: str
    body: str
    closed: bool


def blocks(text: str) -> Iterator[Block]:
    """The messages of a turn; text without a header is one with an empty header."""
    at = 0
    while at < len(text):
        header = _HEADER.match(text, at)
        begin = at if header is None else header.end()
        end = _END.search(text, begin)
        if end is not None and end.end() == at:  # a start tag without a header
            end = _END.search(text, at + 1)
        body = text[begin : len(text) if end is None else end.start()]
        yield Block("" if header is None else header[1], body, end is not None)
        if end is None:
            return
        at = end.end()


def said_header(said: str) -> str:
    """The header that the prompt wrote, without what of the body it wrote too."""
    body = said.rfind(_MESSAGE)
    return said if body < 0 else said[: body + len(_MESSAGE)]


_ATEM_RECIPIENT = re.compile(r"\bto=([\w.-]{1,256})")

_CALLS = TaggedValues(
    opening=re.compile(r"(?:<atem:function_calls>\s*)?<atem:invoke name="),
    name=re.compile(r'"(?P<name>[^"<>\n]{1,256})">'),
    key=re.compile(r'<atem:parameter name="(?P<key>[^"<>\n]{1,256})">'),
    ends_value=re.compile(r"</atem:parameter>(?=\s*(?:<atem:parameter name=|</atem:invoke>))"),
    closing=re.compile(r"</atem:invoke>(?:\s*</atem:function_calls>)?"),
    shape='<atem:invoke name="name"><atem:parameter name="key">value</atem:parameter></atem:invoke>',
)


def parse_atem(text: str, before: Before) -> ParsedTurn:
    calls: Calls = []
    thoughts: list[str] = []
    content: list[str] = []
    for block in blocks(said_header(before.said) + text):
        recipient = _ATEM_RECIPIENT.search(block.header)
        to = recipient[1] if recipient is not None else "user"
        if to == "self":
            thoughts.append(block.body)
        elif to == "user":
            content.append(block.body)
        else:
            found = _calls(block.body) or [MalformedCall(f"a message to {to} holds no {_CALLS.shape}")]
            calls += found
            if any(isinstance(call, MalformedCall) for call in found):
                content.append(block.body)
    if not calls and not thoughts and "<|" not in text:
        return ParsedTurn(text, text, [])
    return ParsedTurn(
        text, "\n\n".join(filter(None, content)).strip(), no_more(calls), "\n\n".join(thoughts).strip() or None
    )


def _calls(body: str) -> Calls:
    source, calls, at = CallFinder(body), Calls(), 0
    while (opened := _CALLS.opening.search(body, at)) is not None:
        found, at = _CALLS.read(source, opened)
        calls += found
    return calls


GLM4 = TaggedValues(
    opening=re.compile(r"<tool_call>"),
    name=re.compile(r"\s*(?P<name>[^<>\s{}]{1,256})"),
    key=re.compile(r"<arg_key>(?P<key>[^<>\n]{1,256})</arg_key>\s*<arg_value>"),
    ends_value=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"),
    closing=re.compile(r"</tool_call>"),
    shape="name, then arg_key and arg_value for each argument, all tags closed",
)

_HARMONY_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]{1,256})")

_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


def parse_harmony(text: str, before: Before) -> ParsedTurn:
    calls: Calls = []
    thoughts: list[str] = []
    content: list[str] = []
    for block in blocks(said_header(before.said) + text):
        if (recipient := _HARMONY_RECIPIENT.search(block.header)) is not None:
            calls.append(call := _call(recipient[1], block))
            if isinstance(call, MalformedCall):
                content.append(block.body)
        elif _ANALYSIS.search(block.header) is not None:
            thoughts.append(block.body)
        else:
            content.append(block.body)
    if not calls and not thoughts and "<|" not in text:
        return ParsedTurn(text, text, [])
    return ParsedTurn(
        text, "\n\n".join(filter(None, content)).strip(), no_more(calls), "\n\n".join(thoughts).strip() or None
    )


def _call(name: str, block: Block) -> Call:
    try:
        value, end = read_json(block.body, 0)
    except Unreadable as error:
        return MalformedCall(f"the arguments of {name} are not valid JSON: {error}")
    if block.body[end:].strip():
        return MalformedCall(f"after the arguments of {name} stands {block.body[end:].strip()[:40]!r}")
    if not isinstance(value, dict | str):
        return MalformedCall(f"the arguments of {name} must be a JSON object")
    return ToolCall(name, value)


MINIMAX = TaggedValues(
    opening=re.compile(r"(?:<minimax:tool_call>\s*)?<invoke name="),
    name=re.compile(r'"?(?P<name>[^"<>\n]{1,256})"?>'),
    key=re.compile(r'<parameter name="?(?P<key>[^"<>\n]{1,256})"?>'),
    ends_value=re.compile(r"</parameter>(?=\s*(?:<parameter name=|</invoke>))"),
    closing=re.compile(r"</invoke>(?:\s*</minimax:tool_call>)?"),
    shape='<invoke name="name"><parameter name="key">value</parameter></invoke>',
)

QWEN3_XML = TaggedValues(
    opening=re.compile(r"<tool_call>(?:\s*<function=)?|<function="),
    name=re.compile(r"(?<=<function=)(?P<name>[^<>\n]{1,256})>"),
    key=re.compile(r"<parameter=(?P<key>[^<>\n]{1,256})>"),
    ends_value=re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))"),
    closing=re.compile(r"</function>(?:\s*</tool_call>)?"),
    shape="function=name, then parameter=key and a value for each argument, all tags closed",
    lines=True,
)
