"""ATEM of Muse Glimmer: a message to `self` is reasoning, one to a tool holds
`<atem:invoke name="..."><atem:parameter name="...">value</atem:parameter></atem:invoke>`, one to `user` is content."""

from __future__ import annotations

import re

from rollout_worker.chat.base import MalformedCall, ParsedTurn
from rollout_worker.chat.parsers.base import Before, CallFinder, Calls, no_more
from rollout_worker.chat.parsers.blocks import blocks, said_header
from rollout_worker.chat.parsers.tagged_calls import TaggedValues

_RECIPIENT = re.compile(r"\bto=([\w.-]{1,256})")
_CALLS = TaggedValues(
    opening=re.compile(r"(?:<atem:function_calls>\s*)?<atem:invoke name="),
    name=re.compile(r'"(?P<name>[^"<>\n]{1,256})">'),
    key=re.compile(r'<atem:parameter name="(?P<key>[^"<>\n]{1,256})">'),
    ends_value=re.compile(r"</atem:parameter>(?=\s*(?:<atem:parameter name=|</atem:invoke>))"),
    closing=re.compile(r"</atem:invoke>(?:\s*</atem:function_calls>)?"),
    shape='<atem:invoke name="name"><atem:parameter name="key">value</atem:parameter></atem:invoke>',
)


def parse(text: str, before: Before) -> ParsedTurn:
    calls: Calls = []
    thoughts: list[str] = []
    content: list[str] = []
    for block in blocks(said_header(before.said) + text):
        recipient = _RECIPIENT.search(block.header)
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
