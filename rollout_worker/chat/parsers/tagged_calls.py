"""Reads the notations that put tags around each value, and the two notations of whole turns.

Notations of calls: a call is a name and then pairs of key and value, all as text. A value is text as the policy wrote
it. The tool's schema says which type it should have, and the tools read it as that type. A value ends at the closing
tag that more of the call follows, so a value may contain tags itself.

- GLM 4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.
- MiniMax M2:
  `<minimax:tool_call><invoke name="..."><parameter name="...">value</parameter></invoke></minimax:tool_call>`. The
  outer tags may contain several calls.
- Qwen3-Coder, Qwen3.5 and later, Nemotron 3:
  `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`. Some of them leave out the outer
  tag.

Notations of whole turns: a turn is several messages. Each has a header that names its recipient or channel.

- OpenAI's harmony: a message on the analysis channel is reasoning, a message to `functions.name` is a call, and others
  are content. https://cookbook.openai.com/articles/openai-harmony
- ATEM of Muse Glimmer: a message to `self` is reasoning, and a message to `user` is content. A message to a tool holds
  `<atem:invoke name="..."><atem:parameter name="...">value</atem:parameter></atem:invoke>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.rollout_worker.chat.parsers.base import (
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

# A header is short, so a longer match would be text.
_HEADER = re.compile(r"(?:<\|start\|>)?([^<]{0,300}(?:<\|(?:channel|constrain)\|>[^<]{0,300}){0,3})<\|message\|>")

_MESSAGE = "<|message|>"

_END = re.compile(r"<\|(?:end|eom|eot|call|return)\|>|(?=<\|start\|>)")

_ATEM_RECIPIENT = re.compile(r"\bto=([\w.-]{1,256})")

_HARMONY_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]{1,256})")

_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


@dataclass(frozen=True, slots=True)
class TaggedValues:
    """Reads calls that put tags around each value.

    Attributes:
        opening: Pattern of the opening of a call or block.
        name: Pattern of the tool's name, right after the opening. It has a group `name`.
        key: Pattern of the tag before a value. It has a group `key`.
        ends_value: Pattern of the tag after a value, with a lookahead for the text that follows.
        closing: Pattern of the end of a call.
        shape: Form of a call, as the policy is told it.
        lines: A value stands on its own lines. Their line breaks are not part of the value.
    """

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
            return self._malformed(source, at, f"it continues with {text[at : at + 40]!r}")
        return [ToolCall(encodable(named["name"].strip()), arguments, as_text=True)], closed.end()

    def _malformed(self, source: CallFinder, at: int, why: str) -> tuple[Calls, int]:
        """Return a malformed call that ends where the call closes, or where the next one opens."""
        closing, following = source.find(self.closing, at), source.find(self.opening, at)
        end = len(source.text)
        if following is not None:
            end = following.start()
        if closing is not None and closing.start() <= end:
            end = closing.end()
        return [MalformedCall(f"the tool call is not of the form {self.shape}: {why}")], end


def _without_line_breaks(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


@dataclass(frozen=True, slots=True)
class Block:
    """Holds one message of a turn.

    Attributes:
        header: The header's text, without its first and last tag. Empty for text without a header.
        body: The message's text.
        closed: A tag that ends the message follows it.
    """

    header: str
    body: str
    closed: bool


def blocks(text: str) -> Iterator[Block]:
    """Yield the messages of a turn. Text without a header is a message with an empty header."""
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


def begun_header(begun: str) -> str:
    """Return the header that the prompt wrote, without any part of the body that it wrote too."""
    body = begun.rfind(_MESSAGE)
    return begun if body < 0 else begun[: body + len(_MESSAGE)]


def _turn_of_blocks(text: str, calls: Calls, thoughts: Sequence[str], content: Sequence[str]) -> ParsedTurn:
    """Return the turn that the blocks of `text` make; `text` without any mark of a block is content as it stands."""
    if not calls and not thoughts and "<|" not in text:
        return ParsedTurn(text, text, [])
    return ParsedTurn(
        text, "\n\n".join(filter(None, content)).strip(), no_more(calls), "\n\n".join(thoughts).strip() or None
    )


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
    for block in blocks(begun_header(before.begun) + text):
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
    return _turn_of_blocks(text, calls, thoughts, content)


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


def parse_harmony(text: str, before: Before) -> ParsedTurn:
    calls: Calls = []
    thoughts: list[str] = []
    content: list[str] = []
    for block in blocks(begun_header(before.begun) + text):
        if (recipient := _HARMONY_RECIPIENT.search(block.header)) is not None:
            calls.append(call := _call(recipient[1], block))
            if isinstance(call, MalformedCall):
                content.append(block.body)
        elif _ANALYSIS.search(block.header) is not None:
            thoughts.append(block.body)
        else:
            content.append(block.body)
    return _turn_of_blocks(text, calls, thoughts, content)


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
